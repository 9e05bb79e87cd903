/* Observes storages in host memory: records three samples of each at the end of a step, and
 * compares them with the memory at the next step's gate. A sample is a copy of a cache line.
 * probes.c observes storages on devices.
 *
 * An observation first asks the storage for its address, because the storage may have been resized
 * or freed. Then it reads the `_version` of each tensor over the storage, and the cache lines. The
 * step has just evicted this data from the processor's caches. So each observation prefetches data
 * for a later one, and a step may only spend a budget of CPU time, its *credit*. */
#include "observer/observer.h"

#include <string.h>

#define NR_IMPL_LINES 3   /* cache lines of a TensorImpl: storage, sizes, version counter */
#define PREFETCH_AHEAD 8  /* how many storages ahead data is prefetched */
#define CLOCK_INTERVAL 16 /* storages between two checks of the clock */

/* Each step adds a hundredth of the time since the last step to the credit, within these bounds. */
#define STEP_SHARE 100
#define STEP_MIN_NS 200000u
#define STEP_MAX_NS 2000000u
/* A new table adds an allowance for each undecided storage, which needs four observations. An
 * observation takes 0.6 to 1 us (measured), mostly cache and page-table misses. */
#define ALLOWANCE_NS 3000u
#define ALLOWANCE_MAX_NS 4000000u
/* The allowance of a storage on a device, in device time: four probes of 2 us each. */
#define DEVICE_ALLOWANCE_NS 8000u
#define DEVICE_ALLOWANCE_MAX_NS 10000000u

uint64_t sfr_py_clock_ns(clockid_t id)
{
	struct timespec ts = { 0 };

	(void)clock_gettime(id, &ts); /* cannot fail for the clocks that are used here */
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Adds a step's share to a credit, but at most up to three shares: unused shares must not add up to
 * one slow step. A credit that is larger, from the allowance of a new table, stays as it is. */
static void add_share(uint64_t *credit_ns, uint64_t share)
{
	const uint64_t limit = 3 * share;

	if (*credit_ns + share < limit)
		*credit_ns += share;
	else if (*credit_ns < limit)
		*credit_ns = limit;
}

/* Adds the share of the step that ends now to both credits. */
static void grant_credit(struct sfr_py_observer *self)
{
	uint64_t now = sfr_py_clock_ns(CLOCK_MONOTONIC);
	uint64_t share = (now - self->last_step_ns) / STEP_SHARE;

	if (share < STEP_MIN_NS)
		share = STEP_MIN_NS;
	if (share > STEP_MAX_NS)
		share = STEP_MAX_NS;
	self->last_step_ns = now;
	add_share(&self->credit_ns, share);
	add_share(&self->device_credit_ns, share);
}

/* Measures CPU time against a budget. Reading CPU time is a system call of 0.5 us, so it is read
 * only once the budget has passed in wall time. */
struct timer {
	uint64_t wall_ns, cpu_ns; /* the clocks at the start */
	uint64_t budget_ns;
};

static struct timer timer_start(uint64_t budget_ns)
{
	return (struct timer){ sfr_py_clock_ns(CLOCK_MONOTONIC),
			       sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID), budget_ns };
}

static int budget_is_spent(const struct timer *t)
{
	return sfr_py_clock_ns(CLOCK_MONOTONIC) - t->wall_ns >= t->budget_ns &&
	       sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID) - t->cpu_ns >= t->budget_ns;
}

/* Subtracts the CPU time since the timer's start from the credit, down to 0. */
static void charge_cpu_time(const struct timer *t, uint64_t *credit_ns)
{
	uint64_t spent = sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID) - t->cpu_ns;

	*credit_ns = spent < *credit_ns ? *credit_ns - spent : 0;
}

/* Returns the address of a storage's sample `i`: the cache line at the start (0), in the middle (1)
 * or at the end (2). They do not overlap, because a watched storage is longer than a page. */
static const unsigned char *sample_address(const struct sfr_py_watched_storage *watch, int i)
{
	uint64_t addr = watch->addr;

	if (i == 1)
		addr += (watch->nbytes / 2) & ~(uint64_t)(SFR_PY_CACHE_LINE - 1);
	else if (i == 2)
		addr += watch->nbytes - SFR_PY_CACHE_LINE;
	return (const unsigned char *)(uintptr_t)addr; /* NOLINT: an address that torch gave */
}

/* Prefetches the data that an observation of this storage reads. Stale addresses do no harm. */
static void prefetch_watch(const struct sfr_py_observer *self, uint32_t watch_index)
{
	const struct sfr_py_watched_storage *watch = &self->table.watches[watch_index];
	const struct sfr_py_watched_tensor *entry = &self->table.tensors[watch->first_tensor];
	int i;

	sfr_py_prefetch((uintptr_t)entry->ref);
	sfr_py_prefetch(entry->tensor);
	for (i = 0; i < NR_IMPL_LINES; i++)
		sfr_py_prefetch(entry->impl + (uint64_t)i * SFR_PY_CACHE_LINE);
	sfr_py_prefetch(watch->storage_object);
	sfr_py_prefetch(watch->cdata);
	sfr_py_prefetch(watch->cdata + SFR_PY_CACHE_LINE);
	if (watch->device_plus_1 != 0) /* the host cannot read the samples */
		return;
	for (i = 0; i < SFR_PY_NR_SAMPLES; i++) {
		sfr_py_prefetch((uintptr_t)sample_address(watch, i));
		sfr_py_prefetch((uintptr_t)self->samples[watch_index][i]);
	}
}

/* Returns 1 if every tensor over the storage is alive and still has the memory of `watch`, so that
 * the bytes may be read. Else returns 0, without an exception. Does not notice if another storage
 * has the same address now; defer() does. */
static int tensors_have_same_memory(const struct sfr_py_watch_table *t,
				    const struct sfr_py_watched_storage *watch)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	uint32_t i;

	for (i = watch->first_tensor; i != SFR_PY_NONE; i = t->tensors[i].next) {
		PyObject *tensor = sfr_py_referent(t->tensors[i].ref), *storage;
		uint64_t addr = 0, nbytes = 0;
		int is_known;

		if (!tensor || tensor == Py_None) /* the tensor was freed */
			return 0;
		Py_INCREF(tensor);
		storage = sfr_py_storage_of(tensor);
		is_known = storage && sfr_py_read_u64(&torch->data_ptr, storage, &addr) == 0 &&
			   sfr_py_read_u64(&torch->nbytes, storage, &nbytes) == 0;
		PyErr_Clear();
		Py_XDECREF(storage);
		Py_DECREF(tensor);
		if (!is_known || addr != watch->addr || nbytes != watch->nbytes)
			return 0;
	}
	return 1;
}

/* Reads a tensor's version counter. Returns 1; 0 without an exception if the tensor was freed, or
 * is an inference tensor, which has no counter. */
static int read_version(const struct sfr_py_watched_tensor *entry, uint64_t *version)
{
	PyObject *tensor = sfr_py_referent(entry->ref);
	int failed;

	if (!tensor)
		return 0;
	Py_INCREF(tensor);
	failed = sfr_py_version_of(tensor, version);
	Py_DECREF(tensor);
	if (failed)
		PyErr_Clear();
	return !failed;
}

/* Stores the version of each tensor over the storage. Returns 0 if a version cannot be read, else
 * 1. */
static int store_versions(struct sfr_py_watch_table *t, const struct sfr_py_watched_storage *watch)
{
	for (uint32_t i = watch->first_tensor; i != SFR_PY_NONE; i = t->tensors[i].next) {
		uint64_t version = 0;

		if (!read_version(&t->tensors[i], &version))
			return 0;
		t->tensors[i].version = version;
	}
	return 1;
}

/* Returns 1 if each tensor over the storage has the stored version, else 0. */
static int versions_are_unchanged(const struct sfr_py_watch_table *t,
				  const struct sfr_py_watched_storage *watch)
{
	for (uint32_t i = watch->first_tensor; i != SFR_PY_NONE; i = t->tensors[i].next) {
		uint64_t version = 0;

		if (!read_version(&t->tensors[i], &version) || version != t->tensors[i].version)
			return 0;
	}
	return 1;
}

/* Makes saves capture a storage that cannot be observed any more. */
static void stop_observing(struct sfr_py_observer *self, struct sfr_py_watched_storage *watch)
{
	sfr_py_observer_set_verdict(self, watch, SFR_PY_CAPTURED);
	self->table_is_stale = 1;
}

/* Records versions and samples of a storage, or adds a storage on a device to a probe. The caller
 * has checked that the storage still has its memory. */
static void record_storage(struct sfr_py_observer *self, uint32_t watch_index)
{
	struct sfr_py_watch_table *t = &self->table;
	struct sfr_py_watched_storage *watch = &t->watches[watch_index];
	int i;

	if (!store_versions(t, watch)) {
		stop_observing(self, watch);
		return;
	}
	if (watch->device_plus_1 != 0) {
		sfr_py_probes_add_watch(self, watch_index);
		return;
	}
	for (i = 0; i < SFR_PY_NR_SAMPLES; i++)
		memcpy(self->samples[watch_index][i], sample_address(watch, i), SFR_PY_CACHE_LINE);
	self->to_compare[self->nr_to_compare++] = watch_index;
}

/* Begins at the cursor, and stops when all watches were visited or half of the credit is spent. */
void sfr_py_observer_record_samples(struct sfr_py_observer *self)
{
	struct sfr_py_watch_table *t = &self->table;
	uint32_t nr_left = t->nr_watches, nr_seen = 0, i = self->cursor;
	struct timer timer;

	grant_credit(self);
	timer = timer_start(self->credit_ns / 2); /* the comparison gets the other half */
	self->nr_to_compare = 0;
	for (; nr_left > 0; nr_left--, i++) {
		if (i >= t->nr_watches)
			i = 0;
		if (t->watches[i].verdict != SFR_PY_UNDECIDED)
			continue;
		if (i + PREFETCH_AHEAD < t->nr_watches)
			prefetch_watch(self, i + PREFETCH_AHEAD);
		if (tensors_have_same_memory(t, &t->watches[i]))
			record_storage(self, i);
		else
			stop_observing(self, &t->watches[i]);
		if (++nr_seen % CLOCK_INTERVAL == 0 && budget_is_spent(&timer))
			break;
	}
	charge_cpu_time(&timer, &self->credit_ns);
	sfr_py_probes_make_first_due(self);
}

static uint64_t compute_allowance(uint64_t nr_storages, uint64_t ns_per_storage, uint64_t limit_ns)
{
	const uint64_t total_ns = nr_storages * ns_per_storage;

	return total_ns < limit_ns ? total_ns : limit_ns;
}

void sfr_py_observer_record_all_samples(struct sfr_py_observer *self)
{
	uint32_t nr_device = 0, i;

	for (i = 0; i < self->table.nr_watches; i++)
		if (self->table.watches[i].verdict == SFR_PY_UNDECIDED &&
		    self->table.watches[i].device_plus_1 != 0)
			nr_device++;
	/* set before the recording, which spends device credit */
	self->device_credit_ns =
		compute_allowance(nr_device, DEVICE_ALLOWANCE_NS, DEVICE_ALLOWANCE_MAX_NS);
	for (i = 0; i < self->table.nr_watches; i++) {
		if (self->table.watches[i].verdict == SFR_PY_UNDECIDED)
			record_storage(self, i);
	}
	/* set after the recording, whose CPU time does not count */
	self->credit_ns = compute_allowance(self->nr_undecided, ALLOWANCE_NS, ALLOWANCE_MAX_NS);
	sfr_py_probes_make_first_due(self);
	grant_credit(self);
}

/* Returns 1 if an undecided storage still has the recorded address and versions, so that its bytes
 * have to be compared next. Otherwise returns 0, and the storage has a verdict: CAPTURED, if it was
 * undecided. */
static int check_unchanged(struct sfr_py_observer *self, uint32_t watch_index)
{
	struct sfr_py_watch_table *t = &self->table;
	struct sfr_py_watched_storage *watch = &t->watches[watch_index];
	int same_memory;

	if (watch->verdict != SFR_PY_UNDECIDED)
		return 0;
	same_memory = tensors_have_same_memory(t, watch);
	if (same_memory && versions_are_unchanged(t, watch))
		return 1;
	sfr_py_observer_set_verdict(self, watch, SFR_PY_CAPTURED);
	if (!same_memory) /* the next table will have the new tensor or storage */
		self->table_is_stale = 1;
	return 0;
}

/* Compares a storage in host memory with its recorded samples, and gives a verdict. */
static void compare_with_samples(struct sfr_py_observer *self, uint32_t watch_index)
{
	struct sfr_py_watched_storage *watch = &self->table.watches[watch_index];
	int same = 1;

	if (!check_unchanged(self, watch_index)) /* there is a verdict already */
		return;
	for (int i = 0; i < SFR_PY_NR_SAMPLES && same; i++)
		same = memcmp(self->samples[watch_index][i], sample_address(watch, i),
			      SFR_PY_CACHE_LINE) == 0;
	if (!same)
		sfr_py_observer_set_verdict(self, watch, SFR_PY_CAPTURED);
	else if (++watch->nr_cycles == SFR_PY_NR_CYCLES)
		sfr_py_observer_set_verdict(self, watch, SFR_PY_DEFERRABLE);
}

void sfr_py_observer_compare_samples(struct sfr_py_observer *self)
{
	struct timer timer = timer_start(self->credit_ns);
	uint32_t n = 0;

	sfr_py_probes_make_second_due(self, check_unchanged);
	if (self->nr_to_compare == 0)
		return;
	while (n < self->nr_to_compare) {
		if (n + PREFETCH_AHEAD < self->nr_to_compare)
			prefetch_watch(self, self->to_compare[n + PREFETCH_AHEAD]);
		compare_with_samples(self, self->to_compare[n++]);
		if (n % CLOCK_INTERVAL == 0 && budget_is_spent(&timer))
			break;
	}
	charge_cpu_time(&timer, &self->credit_ns);
	self->cursor = self->to_compare[n - 1] + 1; /* the watch after the one compared last */
	self->nr_to_compare = 0;
}
