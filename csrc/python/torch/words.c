/* Words of torch's memory that answer most questions about a tensor.
 *
 * A TensorImpl is torch's C++ object of a tensor. One of its words, the dispatch keys, tells
 * whether the tensor is dense, nested, conjugated, negated or named, and on what kind of device it
 * is. A second word is the address of the tensor's StorageImpl. A third, in the Python object, is
 * the address of the TensorImpl. To read the same as Python attributes took some 2,500 instructions
 * a tensor, most of them for the Python objects of the answers. The stable ABI (shim.h) has no
 * functions for these three words. So they are read from memory.
 *
 * Their offsets are not assumed but searched for, once per process, in tensors of several kinds
 * whose words torch has reported. An offset is taken if it has the right word in all of these
 * tensors, so a torch with another layout is read correctly too. If a word is not found, nothing is
 * read: `known` stays false, and tensors are left to their own __reduce_ex__. */
#include "torch/words.h"

enum {
	MOST_SAMPLES = 8,
	/* how many words are searched: no more than the shortest objects of any known torch have */
	NR_OBJECT_WORDS = 6, /* of a tensor's Python object */
	NR_IMPL_WORDS = 24,  /* of a TensorImpl */
};

struct sfr_py_words sfr_py_words;

/* A tensor, a capsule with its handle, and the words that torch has reported. */
struct sample {
	PyObject *tensor, *capsule; /* borrowed */
	unsigned long long impl, keys, storage;
};

/* Searches `nr` objects at the addresses `bases`. Returns the least offset, in bytes, at which each
 * object i has the word values[i]; 0 if their first nr_words words have no such offset. The first
 * word is not looked at, so 0 is never an answer. Reads nothing beyond the offset that it
 * returns. */
static size_t find_offset(const void *const *bases, const uint64_t *values, size_t nr,
			  size_t nr_words)
{
	for (size_t at = 1; at < nr_words; at++) {
		size_t i = 0;

		while (i < nr && sfr_py_word_at(bases[i], at * sizeof(uint64_t)) == values[i])
			i++;
		if (i == nr)
			return at * sizeof(uint64_t);
	}
	return 0;
}

/* Returns whether the sample's handle points to a pointer to the TensorImpl. The files here rely on
 * that: they use the address of an at::Tensor, which consists of this pointer, as a handle. */
static bool is_handle_as_expected(const struct sample *sample)
{
	const void *handle = PyCapsule_GetPointer(sample->capsule, NULL);

	PyErr_Clear(); /* not a capsule */
	return handle != NULL && sfr_py_word_at(handle, 0) == sample->impl;
}

/* Sets sfr_py_words if all three words are found. */
static void learn(const struct sample *samples, size_t nr)
{
	struct sfr_py_words words = { 0 };
	const void *bases[MOST_SAMPLES];
	uint64_t values[MOST_SAMPLES];
	size_t i;

	for (i = 0; i < nr; i++) {
		if (!is_handle_as_expected(&samples[i]))
			return;
		bases[i] = samples[i].tensor;
		values[i] = samples[i].impl;
	}
	words.tensor = find_offset(bases, values, nr, NR_OBJECT_WORDS);
	for (i = 0; i < nr; i++) {
		bases[i] = (const void *)(uintptr_t)samples[i].impl;
		values[i] = samples[i].keys;
	}
	words.keys = find_offset(bases, values, nr, NR_IMPL_WORDS);
	for (i = 0; i < nr; i++)
		values[i] = samples[i].storage;
	words.storage = find_offset(bases, values, nr, NR_IMPL_WORDS);
	words.known = nr != 0 && words.tensor != 0 && words.keys != 0 && words.storage != 0;
	sfr_py_words = words;
}

int sfr_py_words_learn(PyObject *list)
{
	struct sample samples[MOST_SAMPLES];
	Py_ssize_t nr = PyList_Check(list) ? PyList_Size(list) : MOST_SAMPLES + 1;

	if (sfr_py_words.known)
		return 0;
	if (nr > MOST_SAMPLES) {
		PyErr_Format(PyExc_TypeError, "samples are a list of at most %d", MOST_SAMPLES);
		return -1;
	}
	for (Py_ssize_t i = 0; i < nr; i++) {
		struct sample *one = &samples[i];

		if (!PyArg_ParseTuple(PyList_GetItem(list, i), "OKKKO:sample", &one->tensor,
				      &one->impl, &one->keys, &one->storage, &one->capsule))
			return -1;
	}
	learn(samples, (size_t)nr);
	return 0;
}
