/* Words of torch's memory: what torch answers most questions about a tensor from.
 *
 * Whether a tensor is dense, nested, conjugated, negated or named, and on what kind of device, torch
 * reads out of one word of its TensorImpl, the set of dispatch keys; a second word is the address of
 * its StorageImpl. Asked one by one, as attributes, the same took some 2,500 instructions a tensor, most
 * of them for objects of Python's that hold the answers. The stable ABI has functions for the rest
 * (shim.h) and none for these two, nor for the way from Python's object to the tensor. So the words
 * are read where they stand.
 *
 * Where that is, is never assumed. It is looked for once a process, in tensors of several kinds of
 * which torch has said what the words are: a place counts when it has the right word in all of them.
 * A torch that keeps them at other places is read as rightly. Of one that has them nowhere nothing is
 * read: `known` stays false, and tensors are left to their own __reduce_ex__.
 */
#include "torch/words.h"

enum {
	MOST_SAMPLES = 8,
	NR_OBJECT_WORDS = 6, /* of Python's object for a tensor, the shortest one known */
	NR_IMPL_WORDS = 24,  /* of a TensorImpl, likewise */
};

struct sfr_py_words sfr_py_words;

struct sample {
	PyObject *tensor, *capsule; /* borrowed */
	unsigned long long impl, keys, storage;
};

/* Where, after the first word, each base has its value: 0 if nowhere. No word behind the first such
 * place is read. */
static size_t find(const void *const *bases, const uint64_t *values, size_t nr, size_t nr_words)
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

/* Whether a handle of torch's leads to the TensorImpl: an at::Tensor is nothing but the pointer. */
static bool is_pointer(const struct sample *sample)
{
	const void *handle = PyCapsule_GetPointer(sample->capsule, NULL);

	PyErr_Clear(); /* something else than a capsule */
	return handle != NULL && sfr_py_word_at(handle, 0) == sample->impl;
}

static void learn(const struct sample *samples, size_t nr)
{
	struct sfr_py_words words = { 0 };
	const void *bases[MOST_SAMPLES];
	uint64_t values[MOST_SAMPLES];
	size_t i;

	for (i = 0; i < nr; i++) {
		if (!is_pointer(&samples[i]))
			return;
		bases[i] = samples[i].tensor;
		values[i] = samples[i].impl;
	}
	words.tensor = find(bases, values, nr, NR_OBJECT_WORDS);
	for (i = 0; i < nr; i++) {
		bases[i] = (const void *)(uintptr_t)samples[i].impl;
		values[i] = samples[i].keys;
	}
	words.keys = find(bases, values, nr, NR_IMPL_WORDS);
	for (i = 0; i < nr; i++)
		values[i] = samples[i].storage;
	words.storage = find(bases, values, nr, NR_IMPL_WORDS);
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
