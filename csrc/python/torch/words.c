/* Three words of torch's memory that answer most questions about a tensor.
 *
 * A TensorImpl is torch's C++ object of a tensor. The words are:
 *
 *   - the address of the TensorImpl, in the Python object,
 *   - the dispatch keys, in the TensorImpl. They tell the kind of device, and whether the tensor is
 *     dense, nested, conjugated, negated or named,
 *   - the address of the tensor's StorageImpl, in the TensorImpl.
 *
 * The stable ABI (shim.h) has no functions for them, and Python attributes cost some 2,500
 * instructions a tensor. So they are read from memory. Their offsets are not assumed but searched
 * for, once per process, in tensors of several kinds whose words torch has reported. If a word is
 * not found, nothing is read: `known` stays false, and tensors are left to their own
 * __reduce_ex__. */
#include "torch/words.h"

enum {
	MOST_SAMPLES = 8,
	/* how many words are searched: in no known torch are the objects shorter */
	NR_OBJECT_WORDS = 6, /* of a tensor's Python object */
	NR_IMPL_WORDS = 24,  /* of a TensorImpl */
};

struct sfr_py_words sfr_py_words;

/* A tensor, a capsule with its handle, and the words that torch has reported. */
struct sample {
	PyObject *tensor, *capsule; /* borrowed */
	unsigned long long impl, keys, storage;
};

/* Returns the least offset, in bytes, at which each object bases[i] has the word values[i].
 * Searches nr_words words, without the first. Returns 0 if there is no such offset. */
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

/* Returns whether the sample's handle points to a pointer to the TensorImpl. sfr_py_handle_of
 * relies on that. */
static bool is_handle_as_expected(const struct sample *sample)
{
	const void *handle = PyCapsule_GetPointer(sample->capsule, NULL);

	PyErr_Clear(); /* not a capsule */
	return handle != NULL && sfr_py_word_at(handle, 0) == sample->impl;
}

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
