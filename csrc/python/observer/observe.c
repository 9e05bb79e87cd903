/* Observes storages: records their contents at the end of a step, and compares them at the next
 * gate.
 *
 * An observation reads the `_version` of each tensor over the storage and three cache lines of its
 * bytes. Before that the storage is asked for its address, because it may have been resized or
 * freed meanwhile. All of that is cheap only in the caches, through which a step has just streamed
 * the whole state. So each observation prefetches what a later one will read, and a step has a
 * CPU-time budget. */
#include "observer/observer.h"

#include <string.h>

#define NR_IMPL_LINES 3 /* lines of a TensorImpl: storage, sizes, version counter */
#define AHEAD 8         /* how many storages ahead memory is prefetched */
#define BUDGET_EACH 16  /* storages between two checks of the clock */
/* CPU time that a step may spend on observing, on average: 0.2 ms, or 1 % of the time since the
 * step before if that is more. After a step an observation has 0.6 to 1 us of cache and page-table
 * misses (measured; 0.2 us with everything warm), and a storage needs four observations. So an
 * enrolment adds an allowance, once, for the observations that follow it: 1,200 storages are
 * decided by the second gate after it. The first save that defers them gains more than all
 * observations cost. */
#define STEP_MIN_NS 200000u
#define STEP_MAX_NS 2000000u
#define STEP_SHARE 100    /* a hundredth of the time between two steps */
#define ENROLLED_NS 3000u /* for each undecided storage */
#define ENROLLED_MAX_NS 4000000u
/* The same in time of a device: a storage needs four probes, in two cycles, of 2 us each. */
#define ENROLLED_DEVICE_NS 8000u
#define ENROLLED_DEVICE_MAX_NS 10000000u

uint64_t sfr_py_clock_ns(clockid_t id)
{
	struct timespec ts = { 0 };

	(void)clock_gettime(id, &ts); /* cannot fail for these two clocks */
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Adds one step's share to the credit, which is what observing may cost until the next step ends.
 * At most three shares add up; an enrolment's allowance above that is kept until it is spent. */
static void grant_credit(struct sfr_py_observer *self)
{
	uint64_t now = sfr_py_clock_ns(CLOCK_MONOTONIC);
	uint64_t share = (now - self->stepped_ns) / STEP_SHARE, most;

	if (share < STEP_MIN_NS)
		share = STEP_MIN_NS;
	if (share > STEP_MAX_NS)
		share = STEP_MAX_NS;
	self->stepped_ns = now;
	most = self->credit_ns > 3 * share ? self->credit_ns : 3 * share;
	self->credit_ns = self->credit_ns + share < most ? self->credit_ns + share : most;
	most = self->device_credit_ns > 3 * share ? self->device_credit_ns : 3 * share;
	self->device_credit_ns =
		self->device_credit_ns + share < most ? self->device_credit_ns + share : most;
}

/* A span of observing, and its budget. The budget is CPU time, because a thread that is off the CPU
 * does not use the training's time. Reading CPU time is a system call of 0.5 us, so it is read only
 * when the wall clock, which is cheap, says that the time is over. */
struct span {
	uint64_t wall, cpu; /* both clocks at its start, in ns */
	uint64_t budget;
};

static struct span span_start(uint64_t budget_ns)
{
	return (struct span){ sfr_py_clock_ns(CLOCK_MONOTONIC),
			      sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID), budget_ns };
}

static int span_is_over(const struct span *s)
{
	return sfr_py_clock_ns(CLOCK_MONOTONIC) - s->wall >= s->budget &&
	       sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID) - s->cpu >= s->budget;
}

/* Subtracts the time spent from the credit. */
static void span_end(const struct span *s, uint64_t *credit_ns)
{
	uint64_t spent = sfr_py_clock_ns(CLOCK_THREAD_CPUTIME_ID) - s->cpu;

	*credit_ns -= spent < *credit_ns ? spent : *credit_ns;
}

/* Returns the address of one of the three lines that are read: start, middle, end. They are apart,
 * because every watched storage is larger than 4 KiB. */
static const unsigned char *line_of(const struct sfr_py_watch *watch, int i)
{
	uint64_t at = watch->addr;

	if (i == 1)
		at += (watch->nbytes / 2) & ~(uint64_t)(SFR_PY_LINE - 1);
	else if (i == 2)
		at += watch->nbytes - SFR_PY_LINE;
	return (const unsigned char *)(uintptr_t)at; /* NOLINT: an address that torch gave */
}

/* Prefetches what an observation of this storage will read; without that an observation has a dozen
 * cache misses. Prefetching cannot fault, so the addresses may be stale. */
static void prefetch(const struct sfr_py_observer *self, uint32_t number)
{
	const struct sfr_py_watch *watch = &self->table.watches[number];
	const struct sfr_py_tensor *entry = &self->table.tensors[watch->first_tensor];
	int i;

	sfr_py_prefetch((uintptr_t)entry->ref);
	sfr_py_prefetch(entry->tensor);
	for (i = 0; i < NR_IMPL_LINES; i++)
		sfr_py_prefetch(entry->impl + (uint64_t)i * SFR_PY_LINE);
	sfr_py_prefetch(watch->wrapper);
	sfr_py_prefetch(watch->cdata);
	sfr_py_prefetch(watch->cdata + SFR_PY_LINE);
	for (i = 0; i < SFR_PY_NR_LINES && watch->device == 0; i++) {
		sfr_py_prefetch((uintptr_t)line_of(watch, i));
		sfr_py_prefetch((uintptr_t)self->lines[number][i]);
	}
}

/* Returns 1 if every tensor over the storage is alive and still has this memory, so that its bytes
 * may be read; 0 if not, or if torch does not tell. It may be another storage at the same address:
 * defer() checks that, so what was learned of a freed storage is never used. Leaves no exception
 * set. */
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

/* Reads the version of each tensor over the storage, and stores it. With `compare` it must be the
 * stored one. Returns 1 if all could be read and were right, else 0. Leaves no exception set. */
static int watch_versions(struct sfr_py_table *t, const struct sfr_py_watch *watch, int compare)
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
			/* an inference tensor counts no versions, and a freed one has none */
			PyErr_Clear();
			return 0;
		}
		if (compare && version != t->tensors[i].version)
			return 0;
		t->tensors[i].version = version;
	}
	return 1;
}

/* Records the contents of one storage, and arms it. `fresh`: it was enrolled a moment ago, which
 * has checked its memory. A storage that cannot be recorded gets the verdict CAPTURED. */
static void record_one(struct sfr_py_observer *self, uint32_t number, int fresh)
{
	struct sfr_py_table *t = &self->table;
	struct sfr_py_watch *watch = &t->watches[number];
	int i;

	if ((!fresh && !watch_is_whole(t, watch)) || !watch_versions(t, watch, 0)) {
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
	self->armed[self->nr_armed++] = number;
}

/* Arms undecided storages from the cursor on, for at most half of the credit; the comparison takes
 * the other half. */
void sfr_py_observer_record(struct sfr_py_observer *self)
{
	struct sfr_py_table *t = &self->table;
	uint32_t left = t->nr_watches, nr_seen = 0, i = self->cursor;
	struct span span;

	grant_credit(self);
	span = span_start(self->credit_ns / 2);
	self->nr_armed = 0;
	for (; left; left--, i++) {
		if (i >= t->nr_watches)
			i = 0;
		if (t->watches[i].verdict != SFR_PY_UNDECIDED)
			continue;
		if (i + AHEAD < t->nr_watches)
			prefetch(self, i + AHEAD);
		record_one(self, i, 0);
		if (++nr_seen % BUDGET_EACH == 0 && span_is_over(&span))
			break;
	}
	span_end(&span, &self->credit_ns);
	sfr_py_probes_end_step(self);
}

/* Returns the credit that an enrolment adds for `nr` storages. */
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
	self->device_credit_ns = allowance(nr_device, ENROLLED_DEVICE_NS, ENROLLED_DEVICE_MAX_NS);
	for (i = 0; i < self->table.nr_watches; i++) {
		if (self->table.watches[i].verdict == SFR_PY_UNDECIDED)
			record_one(self, i, 1);
	}
	self->credit_ns = allowance(self->nr_undecided, ENROLLED_NS, ENROLLED_MAX_NS);
	sfr_py_probes_end_step(self);
	grant_credit(self);
}

/* Compares what the host can see of a storage (its memory's address, its versions) with what was
 * recorded. Returns 1 if it is unchanged; else 0, and the storage has the verdict CAPTURED. */
static int check_unchanged(struct sfr_py_observer *self, uint32_t number)
{
	struct sfr_py_table *t = &self->table;
	struct sfr_py_watch *watch = &t->watches[number];
	int whole;

	if (watch->verdict != SFR_PY_UNDECIDED)
		return 0;
	whole = watch_is_whole(t, watch);
	if (whole && watch_versions(t, watch, 1))
		return 1;
	sfr_py_observer_decide(self, watch, SFR_PY_CAPTURED);
	/* The tensor or its storage was replaced; the next enrolment finds the new one. */
	if (!whole)
		self->wanted = 1;
	return 0;
}

/* Compares one storage in host memory with its recorded contents, and gives the verdict if it
 * differs or has been the same often enough. */
static void compare_one(struct sfr_py_observer *self, uint32_t number)
{
	struct sfr_py_watch *watch = &self->table.watches[number];
	int i;

	if (!check_unchanged(self, number))
		return;
	for (i = 0; i < SFR_PY_NR_LINES; i++) {
		if (memcmp(self->lines[number][i], line_of(watch, i), SFR_PY_LINE) != 0)
			break;
	}
	if (i < SFR_PY_NR_LINES)
		sfr_py_observer_decide(self, watch, SFR_PY_CAPTURED);
	else if (++watch->nr_cycles == SFR_PY_NR_CYCLES)
		sfr_py_observer_decide(self, watch, SFR_PY_DEFERRABLE);
}

void sfr_py_observer_compare(struct sfr_py_observer *self)
{
	struct span span = span_start(self->credit_ns);
	uint32_t n = 0;

	sfr_py_probes_reach_gate(self, check_unchanged);
	if (self->nr_armed == 0)
		return;
	while (n < self->nr_armed) {
		if (n + AHEAD < self->nr_armed)
			prefetch(self, self->armed[n + AHEAD]);
		compare_one(self, self->armed[n++]);
		if (n % BUDGET_EACH == 0 && span_is_over(&span))
			break;
	}
	span_end(&span, &self->credit_ns);
	self->cursor = self->armed[n - 1] + 1; /* the next undecided one is after it */
	self->nr_armed = 0;
}
