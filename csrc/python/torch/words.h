/* Words of torch's memory. See words.c. */
#ifndef SFR_PY_TORCH_WORDS_H
#define SFR_PY_TORCH_WORDS_H

#include <stdbool.h>
#include <string.h>

#include "module.h"

/* Where the words stand, in bytes: in a tensor's object its at::Tensor, which is one pointer to the
 * TensorImpl, and in that the set of dispatch keys and the pointer to the StorageImpl. */
struct sfr_py_words {
	size_t tensor, keys, storage;
	bool known; /* before that nothing below may be called */
};
extern struct sfr_py_words sfr_py_words;

static inline uint64_t sfr_py_word_at(const void *base, size_t offset)
{
	uint64_t word;

	memcpy(&word, (const char *)base + offset, sizeof(word));
	return word;
}

/* Of objects whose type is torch's Tensor or inherits from it. The at::Tensor, as torch's C shim takes
 * it for a handle; borrowed from the object. */
static inline struct AtenTensorOpaque *sfr_py_handle_of(PyObject *tensor)
{
	return (struct AtenTensorOpaque *)((char *)tensor + sfr_py_words.tensor);
}

/* The address of the TensorImpl. */
static inline uintptr_t sfr_py_impl_of(PyObject *tensor)
{
	return (uintptr_t)sfr_py_word_at(tensor, sfr_py_words.tensor);
}

static inline uint64_t sfr_py_keys_of(PyObject *tensor)
{
	return sfr_py_word_at((const void *)sfr_py_impl_of(tensor), sfr_py_words.keys);
}

/* The address of the StorageImpl, 0 where there is none. */
static inline uint64_t sfr_py_storage_impl_of(PyObject *tensor)
{
	return sfr_py_word_at((const void *)sfr_py_impl_of(tensor), sfr_py_words.storage);
}

/* Looks for the words in tensors of which torch has said what they are: a list of (tensor, address of
 * its TensorImpl, dispatch keys, address of its StorageImpl, capsule with a handle of torch's C shim).
 * 0, whether they were found or not; -1 with an exception set. */
int sfr_py_words_learn(PyObject *samples);

#endif
