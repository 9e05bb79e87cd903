/* The three words of torch's memory that are read for every tensor. words.c says why. */
#ifndef SFR_PY_TORCH_WORDS_H
#define SFR_PY_TORCH_WORDS_H

#include <stdbool.h>
#include <string.h>

#include "module.h"

/* The offsets of the words, in bytes. */
struct sfr_py_word_offsets {
	size_t tensor;  /* in the Python object: the at::Tensor, a pointer to the TensorImpl */
	size_t keys;    /* in the TensorImpl: the dispatch keys */
	size_t storage; /* in the TensorImpl: the pointer to the StorageImpl */
	bool known;     /* the offsets are set; if false, the functions below must not be called */
};
extern struct sfr_py_word_offsets sfr_py_word_offsets;

static inline uint64_t sfr_py_word_at(const void *base, size_t offset)
{
	uint64_t word;

	memcpy(&word, (const char *)base + offset, sizeof(word));
	return word;
}

/* The next four functions take an object of torch's type Tensor or of a subclass.
 *
 * Returns the tensor's handle for torch's C shim, borrowed. */
static inline struct AtenTensorOpaque *sfr_py_handle_of(PyObject *tensor)
{
	return (struct AtenTensorOpaque *)((char *)tensor + sfr_py_word_offsets.tensor);
}

/* Returns the address of the TensorImpl. */
static inline uintptr_t sfr_py_tensor_impl_of(PyObject *tensor)
{
	return (uintptr_t)sfr_py_word_at(tensor, sfr_py_word_offsets.tensor);
}

/* Returns the dispatch keys. */
static inline uint64_t sfr_py_dispatch_keys_of(PyObject *tensor)
{
	return sfr_py_word_at((const void *)sfr_py_tensor_impl_of(tensor),
			      sfr_py_word_offsets.keys);
}

/* Returns the address of the StorageImpl; 0 if there is none. */
static inline uint64_t sfr_py_storage_impl_of(PyObject *tensor)
{
	return sfr_py_word_at((const void *)sfr_py_tensor_impl_of(tensor),
			      sfr_py_word_offsets.storage);
}

/* Searches for the words in sample tensors, and sets sfr_py_word_offsets if all are found.
 * `samples` is a list of (tensor, address of the TensorImpl, dispatch keys, address of the
 * StorageImpl, capsule with the handle). It is no error if a word is not found. */
int sfr_py_learn_word_offsets(PyObject *samples);

#endif
