/* Observes storages in host memory: records samples of them at the end of a step, and compares
 * them at the next step's gate. probes.c observes storages on devices.
 *
 * An observation first asks the storage for its address, because the storage may have been resized
 * or freed. Then it reads the `_version` of each tensor over the storage and three cache lines of
 * the bytes. The step has just evicted this data from the processor's caches. So each observation
 * prefetches data for a later one, and a step has a budget of CPU time, its *credit*. */
#include "observer/observer.h"

#include <string.h>

#define NR_IMPL_LINES 3 /* lines of a TensorImpl: storage, sizes, version counter */
#define AHEAD 8         /* an observation prefetches for the storage so many places later */
#define CHECK_EACH 16   /* storages between two checks of the clock */

/* The share of CPU time that each step adds to the credit: 1 % of the time between two steps,
 * within these bounds. */
#define STEP_SHARE 100
#define STEP_MIN_NS 200000u
#define STEP_MAX_NS 2000000u
/* An enrolment once adds an allowance for each undecided storage, which needs four observations. An
 * observation takes 0.6 to 1 us (measured), mostly cache and page-table misses. */
#define ENROLLED_NS 3000u
#define ENROLLED_MAX_NS 4000000u
/* The allowance in device time, for four probes of 2 us each. */
#define ENROLLED_DEVICE_NS 8000u
#define ENROLLED_DEVICE_MAX_NS 10000000u

uint64_t sfr_py_clock_ns(clockid_t id)
{
	struct timespec ts = { 0 };

	(void)clock_gettime(id, &ts); /* cannot fail for these two clocks */
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Adds a step's share to a credit, up to three shares, so that unused shares do not make one step
 * slow. A larger credit, from an enrolment's allowance, stays. */
static void add_share(uint64_t *credit_ns, uint64_t share)
{
	const uint64_t most = 3 * share;

	if (*credit_ns + share < most)
		*credit_ns += share;
	else if (*credit_ns < most)
		*credit_ns = most;
}

/* Adds the share of the step that ends now to both credits. */
static void grant_credit(struct sfr_py_observer *self)
{
	uint64_t now = sfr_py_clock_ns(CLOCK_MONOTONIC);
	uint64_t share = (now - self->stepped_ns) / STEP_SHARE;

	if (share < STEP_MIN_NS)
		share = STEP_MIN_NS;
	if (share > STEP_MAX_NS)
		share = STEP_MAX_NS;
	self->stepped_ns = now;
	add_share(&self->credit_ns, share);
	add_share(&self->device_credit_ns, share);
}

/* A stretch of observing and its budget of CPU time. Reading CPU time is a system call of 0.5 us,
 * so CPU time is read only once the budget has passed in wall time. */
struct span {
	uint64_t wall_ns, cpu_ns; /* the clocks at the start */
	uint64_t budget_ns;
};

static struct span span_start(uint64_t budget_ns)
{
	return (struct span){ sfr_py_clock_ns(CLOCK_MONOTONIC),
			      sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID), budget_ns };
}

static int span_is_over(const struct span *s)
{
	return sfr_py_clock_ns(CLOCK_MONOTONIC) - s->wall_ns >= s->budget_ns &&
	       sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID) - s->cpu_ns >= s->budget_ns;
}

/* Subtracts the CPU time since the start from the credit, down to 0. */
static void span_end(const struct span *s, uint64_t *credit_ns)
{
	uint64_t spent = sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID) - s->cpu_ns;

	*credit_ns -= spent < *credit_ns ? spent : *credit_ns;
}

/* Returns the address of one of the lines that are read: at the start (`i` 0), in the middle (1) or
 * at the end (2). The lines do not overlap (SFR_PY_HOST_MIN_NBYTES). */
static const unsigned char *line_of(const struct sfr_py_watch *watch, int i)
{
	uint64_t at = watch->addr;

	if (i == 1)
		at += (watch->nbytes / 2) & ~(uint64_t)(SFR_PY_LINE - 1);
	else if (i == 2)
		at += watch->nbytes - SFR_PY_LINE;
	return (const unsigned char *)(uintptr_t)at; /* NOLINT: an address that torch gave */
}

/* Prefetches the data that an observation of this storage reads. The addresses may be stale. */
static void prefetch(const struct sfr_py_observer *self, uint32_t number)
{
	const struct sfr_py_watch *watch = &self->table.watches[number];
	const struct sfr_py_tensor *entry = &self->table.tensors[watch->first_tensor];
	int i;

	sfr_py_prefetch((uintptr_t)entry->ref);
	sfr_py_prefetch(entry->tensor);
	for (i = 0; i < NR_IMPL_LINES; i++)
		sfr_py_prefetch(entry->impl + (uint64_t)i * SFR_PY_LINE);
	sfr_py_prefetch(watch->storage_object);
	sfr_py_prefetch(watch->cdata);
	sfr_py_prefetch(watch->cdata + SFR_PY_LINE);
	if (watch->device != 0)
		return;
	for (i = 0; i < SFR_PY_NR_LINES; i++) {
		sfr_py_prefetch((uintptr_t)line_of(watch, i));
		sfr_py_prefetch((uintptr_t)self->lines[number][i]);
	}
}

/* Returns 1 if every tensor over the storage is alive and still has this memory, so that the bytes
 * may be read, else 0. Leaves no exception set. Does not notice another storage at the same
 * address; defer() does. */
static int watch_is_whole(const struct sfr_py_table *t, const struct sfr_py_watch *watch)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	uint32_t i;

	for (i = watch->first_tensor; i != SFR_PY_NONE; i = t->tensors[i].next) {
		PyObject *tensor = sfr_py_referent(t->tensors[i].ref), *storage;
		uint64_t addr = 0, nbytes = 0;
		int is_known;

		if (!tensor || tensor == Py_None)
			return 0;
		Py_INCREF(tensor);
		storage = sfr_py_storage_of(tensor);
		is_known = storage && !sfr_py_read_u64(&torch->data_ptr, storage, &addr) &&
			   !sfr_py_read_u64(&torch->nbytes, storage, &nbytes);
		PyErr_Clear();
		Py_XDECREF(storage);
		Py_DECREF(tensor);
		if (!is_known || addr != watch->addr || nbytes != watch->nbytes)
			return 0;
	}
	return 1;
}

/* Stores the version of each tensor over the storage. Returns 1; 0 if a version cannot be read or,
 * with `compare`, differs from the stored one. Leaves no exception set. */
static int update_versions(struct sfr_py_table *t, const struct sfr_py_watch *watch, int compare)
{
	uint32_t i;

	for (i = watch->first_tensor; i != SFR_PY_NONE; i = t->tensors[i].next) {
		PyObject *tensor = sfr_py_referent(t->tensors[i].ref);
		uint64_t version = 0;
		int failed;

		if (!tensor)
			return 0;
		Py_INCREF(tensor);
		failed = sfr_py_version_of(tensor, &version);
		Py_DECREF(tensor);
		if (failed) {
			PyErr_Clear(); /* the tensor is an inference tensor, or was freed */
			return 0;
		}
		if (compare && version != t->tensors[i].version)
			return 0;
		t->tensors[i].version = version;
	}
	return 1;
}

/* Records samples of one storage, or adds a storage on a device to a probe. `fresh`: an enrolment
 * has just checked the storage's memory. A storage that cannot be recorded gets the verdict
 * CAPTURED. */
static void record_one(struct sfr_py_observer *self, uint32_t number, int fresh)
{
	struct sfr_py_table *t = &self->table;
	struct sfr_py_watch *watch = &t->watches[number];
	int i;

	if ((!fresh && !watch_is_whole(t, watch)) || !update_versions(t, watch, 0)) {
		sfr_py_observer_decide(self, watch, SFR_PY_CAPTURED);
		self->wanted = 1;
		return;
	}
	if (watch->device != 0) {
		sfr_py_probes_record(self, number);
		return;
	}
	for (i = 0; i < SFR_PY_NR_LINES; i++)
		memcpy(self->lines[number][i], line_of(watch, i), SFR_PY_LINE);
	self->recorded[self->nr_recorded++] = number;
}

/* Begins at the cursor and spends half of the credit. The other half is for the comparison. */
void sfr_py_observer_record(struct sfr_py_observer *self)
{
	struct sfr_py_table *t = &self->table;
	uint32_t left = t->nr_watches, nr_seen = 0, i = self->cursor;
	struct span span;

	grant_credit(self);
	span = span_start(self->credit_ns / 2);
	self->nr_recorded = 0;
	for (; left; left--, i++) {
		if (i >= t->nr_watches)
			i = 0;
		if (t->watches[i].verdict != SFR_PY_UNDECIDED)
			continue;
		if (i + AHEAD < t->nr_watches)
			prefetch(self, i + AHEAD);
		record_one(self, i, 0);
		if (++nr_seen % CHECK_EACH == 0 && span_is_over(&span))
			break;
	}
	span_end(&span, &self->credit_ns);
	sfr_py_probes_end_step(self);
}

static uint64_t allowance(uint64_t nr, uint64_t each_ns, uint64_t most_ns)
{
	return nr * each_ns < most_ns ? nr * each_ns : most_ns;
}

void sfr_py_observer_record_all(struct sfr_py_observer *self)
{
	uint32_t nr_device = 0, i;

	for (i = 0; i < self->table.nr_watches; i++)
		if (self->table.watches[i].verdict == SFR_PY_UNDECIDED &&
		    self->table.watches[i].device != 0)
			nr_device++;
	/* before the recording, which spends device credit */
	self->device_credit_ns = allowance(nr_device, ENROLLED_DEVICE_NS, ENROLLED_DEVICE_MAX_NS);
	for (i = 0; i < self->table.nr_watches; i++) {
		if (self->table.watches[i].verdict == SFR_PY_UNDECIDED)
			record_one(self, i, 1);
	}
	/* after the recording, whose CPU time does not count */
	self->credit_ns = allowance(self->nr_undecided, ENROLLED_NS, ENROLLED_MAX_NS);
	sfr_py_probes_end_step(self);
	grant_credit(self);
}

/* Returns 1 if an undecided storage has the recorded address and versions, so that its bytes have
 * to be compared. Otherwise gives the verdict CAPTURED and returns 0. Returns 0 also if the storage
 * has a verdict already. */
static int check_unchanged(struct sfr_py_observer *self, uint32_t number)
{
	struct sfr_py_table *t = &self->table;
	struct sfr_py_watch *watch = &t->watches[number];
	int whole;

	if (watch->verdict != SFR_PY_UNDECIDED)
		return 0;
	whole = watch_is_whole(t, watch);
	if (whole && update_versions(t, watch, 1))
		return 1;
	sfr_py_observer_decide(self, watch, SFR_PY_CAPTURED);
	if (!whole) /* the next enrolment finds the new tensor or storage */
		self->wanted = 1;
	return 0;
}

/* Compares a storage in host memory with its recorded samples, and gives a verdict. */
static void compare_one(struct sfr_py_observer *self, uint32_t number)
{
	struct sfr_py_watch *watch = &self->table.watches[number];
	int same = 1;

	if (!check_unchanged(self, number))
		return;
	for (int i = 0; i < SFR_PY_NR_LINES && same; i++)
		same = memcmp(self->lines[number][i], line_of(watch, i), SFR_PY_LINE) == 0;
	if (!same)
		sfr_py_observer_decide(self, watch, SFR_PY_CAPTURED);
	else if (++watch->nr_cycles == SFR_PY_NR_CYCLES)
		sfr_py_observer_decide(self, watch, SFR_PY_DEFERRABLE);
}

void sfr_py_observer_compare(struct sfr_py_observer *self)
{
	struct span span = span_start(self->credit_ns);
	uint32_t n = 0;

	sfr_py_probes_reach_gate(self, check_unchanged);
	if (self->nr_recorded == 0)
		return;
	while (n < self->nr_recorded) {
		if (n + AHEAD < self->nr_recorded)
			prefetch(self, self->recorded[n + AHEAD]);
		compare_one(self, self->recorded[n++]);
		if (n % CHECK_EACH == 0 && span_is_over(&span))
			break;
	}
	span_end(&span, &self->credit_ns);
	self->cursor = self->recorded[n - 1] + 1; /* after the last storage compared */
	self->nr_recorded = 0;
}
