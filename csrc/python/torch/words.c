/* Finds three words of torch's memory that answer most questions about a tensor.
 *
 * A TensorImpl is the C++ object behind a tensor. The words are:
 *
 *   - the address of the TensorImpl, in the Python object,
 *   - the dispatch keys, in the TensorImpl. They tell the kind of device, and whether the tensor is
 *     dense, nested, conjugated, negated or named,
 *   - the address of the tensor's StorageImpl, in the TensorImpl.
 *
 * The stable ABI (shim.h) has no functions for them, and Python attributes cost some 2,500
 * instructions a tensor. So they are read from memory. Their offsets are not assumed: once per
 * process they are searched for, in sample tensors whose words torch has reported. If a word is not
 * found, `known` stays false, and callers use torch's slower Python functions. */
#include "torch/words.h"

enum {
	MAX_SAMPLES = 8,
	/* how many words are searched; in every known torch the objects are at least so long */
	NR_OBJECT_WORDS = 6, /* words of a tensor's Python object */
	NR_IMPL_WORDS = 24,  /* words of a TensorImpl */
};

struct sfr_py_word_offsets sfr_py_word_offsets;

/* A tensor, a capsule with its handle, and the words that torch has reported. */
struct sample_tensor {
	PyObject *tensor, *capsule; /* borrowed */
	unsigned long long impl, keys, storage;
};

/* Returns the least offset, in bytes, at which each object bases[i] has the word values[i]. Returns
 * 0 if there is no such offset in the first nr_words words. Offset 0 itself is not searched. */
static size_t find_common_word_offset(const void *const *bases, const uint64_t *values, size_t nr,
				      size_t nr_words)
{
	for (size_t word = 1; word < nr_words; word++) {
		const size_t off = word * sizeof(uint64_t);
		size_t nr_equal = 0;

		while (nr_equal < nr && sfr_py_word_at(bases[nr_equal], off) == values[nr_equal])
			nr_equal++;
		if (nr_equal == nr)
			return off;
	}
	return 0;
}

/* Returns whether the sample's handle points to a pointer to the TensorImpl. sfr_py_handle_of
 * relies on that. */
static bool is_handle_as_expected(const struct sample_tensor *sample)
{
	const void *handle = PyCapsule_GetPointer(sample->capsule, NULL);

	PyErr_Clear(); /* set if it is not a capsule */
	return handle != NULL && sfr_py_word_at(handle, 0) == sample->impl;
}

/* Searches for the three words in the samples, and stores their offsets in sfr_py_word_offsets. */
static void find_word_offsets(const struct sample_tensor *samples, size_t nr)
{
	struct sfr_py_word_offsets words = { 0 };
	const void *bases[MAX_SAMPLES];
	uint64_t values[MAX_SAMPLES];
	size_t i;

	for (i = 0; i < nr; i++) {
		if (!is_handle_as_expected(&samples[i]))
			return;
		bases[i] = samples[i].tensor;
		values[i] = samples[i].impl;
	}
	words.tensor = find_common_word_offset(bases, values, nr, NR_OBJECT_WORDS);
	for (i = 0; i < nr; i++) {
		bases[i] = (const void *)(uintptr_t)samples[i].impl;
		values[i] = samples[i].keys;
	}
	words.keys = find_common_word_offset(bases, values, nr, NR_IMPL_WORDS);
	for (i = 0; i < nr; i++)
		values[i] = samples[i].storage;
	words.storage = find_common_word_offset(bases, values, nr, NR_IMPL_WORDS);
	/* without a sample every offset matches */
	words.known = nr != 0 && words.tensor != 0 && words.keys != 0 && words.storage != 0;
	sfr_py_word_offsets = words;
}

int sfr_py_learn_word_offsets(PyObject *list)
{
	struct sample_tensor samples[MAX_SAMPLES];
	Py_ssize_t nr;

	if (sfr_py_word_offsets.known)
		return 0;
	if (!PyList_Check(list) || PyList_Size(list) > MAX_SAMPLES) {
		PyErr_Format(PyExc_TypeError, "samples are a list of at most %d", MAX_SAMPLES);
		return -1;
	}
	nr = PyList_Size(list);
	for (Py_ssize_t i = 0; i < nr; i++) {
		struct sample_tensor *one = &samples[i];

		if (!PyArg_ParseTuple(PyList_GetItem(list, i), "OKKKO:sample", &one->tensor,
				      &one->impl, &one->keys, &one->storage, &one->capsule))
			return -1;
	}
	find_word_offsets(samples, (size_t)nr);
	return 0;
}
