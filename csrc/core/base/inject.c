/* Fault injection for tests: wrappers around the system-call table.
 *
 * A wrapper counts the call and looks for a fault (apply_faults). Then the wrapper fails, transfers
 * fewer bytes, waits, or calls the former entry. The product never installs the wrappers.
 *
 * A fault fails a call as the kernel would:
 *   - a failed close has closed the descriptor; every other failed call has done nothing
 *   - a short pwrite has written as many bytes as it returns; with O_DIRECT, which accepts only
 *     whole blocks, the last partial block is counted but not written
 *   - calls that cannot fail, such as free, can only be slow
 *
 * There is no lock, because wrappers also run in forked children, where a lock of another thread
 * would stay taken. So while a test changes the faults, a wrapper may miss a fault or apply one too
 * many. */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/base.h"

#define NR_SLOTS 16           /* most faults at a time */
#define HOLD_STEP_NS 1000000u /* how often a held call checks whether it may continue */
#define DIRECT_BLOCK 4096u    /* bytes; O_DIRECT accepts multiples of it */

/* clang-format off */

/* Entries that can fail: type, name, result of a failure, parameters, arguments. */
#define FAILING_LIST(X)                                                                            \
	X(int, open, -1, (int dir, const char *name, int flags, mode_t mode),                      \
	  (dir, name, flags, mode))                                                                \
	X(int, fdatasync, -1, (int fd), (fd))                                                      \
	X(int, fsync, -1, (int fd), (fd))                                                          \
	X(int, fallocate, -1, (int fd, int mode, off_t off, off_t len), (fd, mode, off, len))      \
	X(int, ftruncate, -1, (int fd, off_t len), (fd, len))                                      \
	X(int, flock, -1, (int fd, int op), (fd, op))                                              \
	X(int, set_flags, -1, (int fd, int flags), (fd, flags))                                    \
	X(int, fstat, -1, (int fd, struct stat *st), (fd, st))                                     \
	X(int, lstat, -1, (int dir, const char *name, struct stat *st), (dir, name, st))           \
	X(char *, realpath, NULL, (const char *path, char *full), (path, full))                    \
	X(int, faccessat, -1, (int dir, const char *path, int mode, int flags),                    \
	  (dir, path, mode, flags))                                                                \
	X(int, mkdir, -1, (int dir, const char *name, mode_t mode), (dir, name, mode))             \
	X(int, rename, -1, (int dir, const char *from, const char *to), (dir, from, to))           \
	X(int, exchange, -1, (int dir, const char *one, const char *other), (dir, one, other))     \
	X(int, unlink, -1, (int dir, const char *name), (dir, name))                               \
	X(int, rmdir, -1, (const char *path), (path))                                              \
	X(DIR *, opendir, NULL, (const char *path), (path))                                        \
	X(int, memfd, -1, (const char *name, unsigned flags), (name, flags))                       \
	X(void *, mmap, MAP_FAILED,                                                                \
	  (void *addr, size_t len, int prot, int flags, int fd, off_t off),                        \
	  (addr, len, prot, flags, fd, off))                                                       \
	X(int, munmap, -1, (void *addr, size_t len), (addr, len))                                  \
	X(int, mprotect, -1, (void *addr, size_t len, int prot), (addr, len, prot))                \
	X(int, madvise, -1, (void *addr, size_t len, int advice), (addr, len, advice))             \
	X(int, mincore, -1, (void *addr, size_t len, unsigned char *vec), (addr, len, vec))        \
	X(int, get_limit, -1, (int resource, struct rlimit *limit), (resource, limit))             \
	X(void *, malloc, NULL, (size_t len), (len))                                               \
	X(void *, calloc, NULL, (size_t nr, size_t len), (nr, len))                                \
	X(void *, realloc, NULL, (void *old, size_t len), (old, len))                              \
	X(int, set_nice, -1, (int value), (value))                                                 \
	X(int, set_slack, -1, (unsigned long ns), (ns))                                            \
	X(int, set_affinity, -1, (const cpu_set_t *cpus), (cpus))

/* Entries that can only be slow: type, name, parameters, arguments. */
#define ONLY_SLOW_LIST(X)                                                                          \
	X(struct dirent *, readdir, (DIR *dir), (dir))                                             \
	X(int, closedir, (DIR *dir), (dir))                                                        \
	X(int, thread_join, (pthread_t thread, void **value), (thread, value))                     \
	X(int, clock_gettime, (clockid_t clock, struct timespec *ts), (clock, ts))

/* Entries with a wrapper of their own: name, whether they can fail. */
#define SPECIAL_LIST(X)                                                                            \
	X(close, true)                                                                             \
	X(pread, true)                                                                             \
	X(pwrite, true)                                                                            \
	X(thread_create, true)                                                                     \
	X(free, false)                                                                             \
	X(capture_copy, false)                                                                     \
	X(lane_copy, false)

enum call {
	CALL_NONE, /* a free slot */
	CALL_BUSY, /* a slot being filled in */
	CALL_ANY,  /* "*" */
#define X(type, name, ...) CALL_##name,
	FAILING_LIST(X) ONLY_SLOW_LIST(X)
#undef X
#define X(name, can_fail) CALL_##name,
	SPECIAL_LIST(X)
#undef X
	NR_CALLS
};

static const struct {
	const char *name;
	bool can_fail;
} calls[NR_CALLS] = {
	[CALL_ANY] = { "*", true },
#define X(type, name, ...) [CALL_##name] = { #name, true },
	FAILING_LIST(X)
#undef X
#define X(type, name, ...) [CALL_##name] = { #name, false },
	ONLY_SLOW_LIST(X)
#undef X
#define X(name, fails) [CALL_##name] = { #name, fails },
	SPECIAL_LIST(X)
#undef X
};

/* clang-format on */

/* One fault. The fields are those of struct sfr_fault, unless there is a comment. They are atomic,
 * because wrappers read them while a test writes. */
struct fault_slot {
	atomic_uint call; /* enum call; set last, because it makes the slot valid */
	_Atomic uint64_t nth, delay_ns;
	_Atomic int64_t limit;
	atomic_int sticky, err;
	_Atomic uint64_t nr_calls; /* calls since the fault was set */
	_Atomic uint64_t number;   /* unique to this fault */
};

static struct fault_slot slots[NR_SLOTS];
static _Atomic uint64_t counts[NR_CALLS]; /* calls of each entry since the last clear */
static _Atomic uint64_t hits;             /* calls on which a fault acted, since the last clear */
static _Atomic uint64_t nr_faults;        /* faults ever set; gives each its number */
static struct sfr_sys real;               /* the former table; valid while installed */
static bool installed;

/* The effect of the faults on one call. */
struct effect {
	int err;       /* 0: the call is made, else its errno */
	int64_t limit; /* the most bytes to transfer; negative values as in struct sfr_fault */
};

static void sleep_ns(uint64_t delay_ns)
{
	struct timespec left = { (time_t)(delay_ns / 1000000000u), (long)(delay_ns % 1000000000u) };

	while (delay_ns && nanosleep(&left, &left) < 0 && errno == EINTR)
		;
}

/* Sleeps until the slot no longer has the fault with this call and number. */
static void wait_until_removed(const struct fault_slot *s, unsigned call, uint64_t number)
{
	while (atomic_load(&s->call) == call && atomic_load(&s->number) == number)
		sleep_ns(HOLD_STEP_NS);
}

/* Counts a call, and returns what a fault does to it; sleeps if the fault says so. Every fault for
 * this call counts the call. Of several that are due, only the first acts. */
static struct effect apply_faults(enum call call)
{
	struct effect effect = { .err = 0, .limit = -1 }; /* no failure, no limit */
	const struct fault_slot *acting = NULL;           /* the slot whose fault acts */
	/* copies of that slot's fields */
	uint64_t delay_ns = 0, number = 0;
	unsigned acting_call = CALL_NONE;

	atomic_fetch_add(&counts[call], 1);
	if (calls[call].can_fail)
		atomic_fetch_add(&counts[CALL_ANY], 1);
	for (int i = 0; i < NR_SLOTS; i++) {
		struct fault_slot *s = &slots[i];
		unsigned slot_call = atomic_load(&s->call);
		bool is_for_call = slot_call == (unsigned)call ||
				   (slot_call == CALL_ANY && calls[call].can_fail);
		uint64_t nr_calls, nth;
		bool is_due;

		if (!is_for_call)
			continue;
		nr_calls = atomic_fetch_add(&s->nr_calls, 1) + 1;
		nth = atomic_load(&s->nth);
		is_due = nr_calls == nth || (nr_calls > nth && atomic_load(&s->sticky));
		if (acting || !is_due)
			continue;
		acting = s;
		effect.err = atomic_load(&s->err);
		effect.limit = atomic_load(&s->limit);
		delay_ns = atomic_load(&s->delay_ns);
		number = atomic_load(&s->number);
		acting_call = slot_call;
	}
	if (!acting)
		return effect;
	atomic_fetch_add(&hits, 1);
	if (delay_ns == SFR_FOREVER)
		wait_until_removed(acting, acting_call, number);
	else
		sleep_ns(delay_ns);
	return effect;
}

/* ---- the wrappers ---- */

/* clang-format off */

#define X(type, name, failed, params, args)                                                    \
	static type inject_##name params                                                       \
	{                                                                                      \
		struct effect effect = apply_faults(CALL_##name);                              \
                                                                                               \
		if (effect.err) {                                                              \
			errno = effect.err;                                                    \
			return failed;                                                         \
		}                                                                              \
		return real.name args;                                                         \
	}
FAILING_LIST(X)
#undef X

#define X(type, name, params, args)                                                            \
	static type inject_##name params                                                       \
	{                                                                                      \
		(void)apply_faults(CALL_##name); /* can only be slow */                        \
		return real.name args;                                                         \
	}
ONLY_SLOW_LIST(X)
#undef X

/* clang-format on */

static int inject_close(int fd)
{
	struct effect effect = apply_faults(CALL_close);
	int rc = real.close(fd); /* Linux closes the descriptor even if it reports an error */

	if (!effect.err)
		return rc;
	errno = effect.err;
	return -1;
}

/* Returns how many of `len` bytes a call transfers. `limit` is that of struct sfr_fault. */
static size_t limit_transfer_len(size_t len, int64_t limit)
{
	if (limit == -1)
		return len;
	if (limit == -2)
		return len / 2;
	if (limit == -3)
		return len ? len - 1 : 0;
	return (uint64_t)limit < len ? (size_t)limit : len;
}

static ssize_t inject_pread(int fd, void *buf, size_t len, off_t off)
{
	struct effect effect = apply_faults(CALL_pread);

	if (effect.err) {
		errno = effect.err;
		return -1;
	}
	return real.pread(fd, buf, limit_transfer_len(len, effect.limit), off);
}

static ssize_t inject_pwrite(int fd, const void *buf, size_t len, off_t off)
{
	struct effect effect = apply_faults(CALL_pwrite);
	size_t limited_len = limit_transfer_len(len, effect.limit);
	size_t whole_len = limited_len / DIRECT_BLOCK * DIRECT_BLOCK;
	ssize_t put;

	if (effect.err) {
		errno = effect.err;
		return -1;
	}
	if (limited_len == 0 && len)
		return 0; /* the fault lets nothing be written */
	put = real.pwrite(fd, buf, limited_len, off);
	if (put < 0 && errno == EINVAL && limited_len < len) {
		/* The descriptor has O_DIRECT and refuses the partial block. So only whole blocks
		 * are written, but limited_len is returned, as if a device had stopped within a
		 * block. */
		put = whole_len ? real.pwrite(fd, buf, whole_len, off) : 0;
		if (put == (ssize_t)whole_len)
			put = (ssize_t)limited_len;
	}
	return put;
}

static int inject_thread_create(pthread_t *thread, const pthread_attr_t *attr,
				void *(*start)(void *), void *arg)
{
	struct effect effect = apply_faults(CALL_thread_create);

	return effect.err ? effect.err : real.thread_create(thread, attr, start, arg);
}

static void inject_free(void *mem)
{
	(void)apply_faults(CALL_free); /* can only be slow */
	real.free(mem);
}

static void inject_capture_copy(void *dst, const void *src, size_t len)
{
	(void)apply_faults(CALL_capture_copy);
	real.capture_copy(dst, src, len);
}

static uint32_t inject_lane_copy(uint32_t crc, void *dst, const void *src, size_t len)
{
	(void)apply_faults(CALL_lane_copy);
	return real.lane_copy(crc, dst, src, len);
}

/* ---- control ---- */

/* Returns the call of this name, or CALL_NONE for an unknown name. */
static enum call find_call(const char *name)
{
	for (int i = CALL_ANY; i < NR_CALLS; i++)
		if (strcmp(calls[i].name, name) == 0)
			return (enum call)i;
	return CALL_NONE;
}

int sfr_inject_install(void)
{
	if (installed)
		return 0;
	installed = true;
	sfr_inject_clear();
	real = sfr_sys;
	/* clang-format off */
#define X(type, name, ...) sfr_sys.name = inject_##name;
	FAILING_LIST(X)
	ONLY_SLOW_LIST(X)
#undef X
#define X(name, can_fail) sfr_sys.name = inject_##name;
	SPECIAL_LIST(X)
#undef X
	/* clang-format on */
	return 0;
}

void sfr_inject_uninstall(void)
{
	if (installed)
		sfr_sys = real;
	installed = false;
	sfr_inject_clear();
}

int sfr_inject_add_fault(const struct sfr_fault *fault)
{
	enum call call = find_call(fault->call);

	if (call == CALL_NONE || fault->nth == 0 || fault->limit < -3 ||
	    (fault->err && !calls[call].can_fail))
		return -EINVAL;
	for (int i = 0; i < NR_SLOTS; i++) {
		struct fault_slot *s = &slots[i];
		unsigned expected = CALL_NONE;

		if (!atomic_compare_exchange_strong(&s->call, &expected, CALL_BUSY))
			continue; /* the slot is in use */
		atomic_store(&s->nth, fault->nth);
		atomic_store(&s->nr_calls, 0);
		atomic_store(&s->sticky, fault->sticky != 0);
		atomic_store(&s->err, fault->err);
		atomic_store(&s->limit, fault->limit);
		atomic_store(&s->delay_ns, fault->delay_ns);
		atomic_store(&s->number, atomic_fetch_add(&nr_faults, 1));
		atomic_store(&s->call, call);
		return 0;
	}
	return -ENOSPC;
}

int sfr_inject_remove_fault(const struct sfr_fault *fault)
{
	unsigned call = find_call(fault->call);

	for (int i = 0; i < NR_SLOTS && call != CALL_NONE; i++) {
		struct fault_slot *s = &slots[i];
		unsigned expected = call; /* only a fault of this call is removed */

		if (atomic_load(&s->nth) == fault->nth &&
		    atomic_load(&s->sticky) == (fault->sticky != 0) &&
		    atomic_load(&s->err) == fault->err && atomic_load(&s->limit) == fault->limit &&
		    atomic_load(&s->delay_ns) == fault->delay_ns &&
		    atomic_compare_exchange_strong(&s->call, &expected, CALL_NONE))
			return 0;
	}
	return -ENOENT;
}

void sfr_inject_clear(void)
{
	for (int i = 0; i < NR_SLOTS; i++)
		atomic_store(&slots[i].call, CALL_NONE);
	for (int i = 0; i < NR_CALLS; i++)
		atomic_store(&counts[i], 0);
	atomic_store(&hits, 0);
}

uint64_t sfr_inject_count_calls(const char *name)
{
	return atomic_load(&counts[find_call(name)]); /* the counter of CALL_NONE stays 0 */
}

uint64_t sfr_inject_hits(void)
{
	return atomic_load(&hits);
}
