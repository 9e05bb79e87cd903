/* State shared by the files of the fake driver, and the beginning and end of every call.
 * fake_cuda.c has the overview. */
#ifndef FAKE_CUDA_STATE_H
#define FAKE_CUDA_STATE_H

#define SFR_NO_CUDA_H
#include <pthread.h>
#include <sys/types.h>

#include "cuda/types.h"
#include "fake_cuda.h"

#define EXPORT __attribute__((visibility("default")))
#define NR_DEVICES 4
#define NR_FAULTS 16
#define NR_VIOLATIONS 64
#define INVALID_CONTEXT 201
#define ALREADY_REGISTERED 712
#define NOT_REGISTERED 713
#define DEPTH 1024               /* operations that a stream takes */
#define MAX_PITCH 0x7fffffffu    /* CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far */
#define CALL_NS 2000             /* the time that a call takes */
#define COPY_NS 1500             /* the time that a copy takes before its first byte */
#define REGISTER_NS_MIN 60000000 /* a GiB */
#define REGISTER_NS_MAX 250000000
#define REGISTER_MAX ((size_t)128 << 20)

enum kind { COPY, RECORD, WAIT, WORK };
struct op {
	struct op *next;
	enum kind kind;
	char *dst; /* COPY: `nr` rows of `len` bytes */
	const char *src;
	size_t len, nr, dst_pitch, src_pitch;
	bool pageable, to_device;
	CUevent event;
	uint64_t gen;
	void (*fn)(void *);
	void *arg;
};

struct CUctx_st {
	int device;
};

/* Handles are never freed, so that the use of a destroyed one is detected. Destroyed streams go
 * to a separate list, so that loops over the others stay short. */
struct CUevent_st {
	struct CUevent_st *next;
	bool alive;
	int device;
	uint64_t recorded, completed; /* generations */
	bool of_caller;               /* its last recording was on a caller's stream */
	bool waited;                  /* some stream waited for its last recording */
	bool timing;
	uint64_t at_ns; /* timing: when its last recording completed */
};

struct CUstream_st {
	struct CUstream_st *next;
	bool alive, of_caller, capturing, knows_caller;
	bool busy;             /* in an operation */
	uint64_t nr_ops;       /* queued and not yet run */
	bool flushed, dropped; /* once destroyed: complete its last copies; complete none */
	int device;
	const struct op *wait; /* the operation that it runs waits for an event */
	struct op *head, *tail;
	struct op *queued; /* copies that the stream has reached and that wait for an event */
	struct op **queued_end;
	pthread_cond_t todo; /* its thread sleeps here */
};

struct registration {
	struct registration *next;
	char *mem;
	size_t len;
	bool allocated;
};

struct fault {
	char name[48];
	uint64_t nth, seen;
	int sticky, code;
};

#define NR_COUNTS 64

struct count {
	char name[48];
	uint64_t nr;
};

/* Everything below is hidden outside the library. */
#pragma GCC visibility push(hidden)

extern struct fake__state {
	pthread_mutex_t mu; /* guards everything */
	pthread_cond_t cv;  /* signalled when an operation has run */
	pid_t owner;
	struct CUctx_st contexts[NR_DEVICES];
	int retained[NR_DEVICES];
	int64_t nr_pushed;       /* contexts, by all threads */
	int dead_of[NR_DEVICES]; /* the error that killed it, or 0 */
	bool inactive[NR_DEVICES];
	bool initialised, pageable_allowed, host_capturing;
	struct CUstream_st *streams, *ended_streams;
	struct registration *registrations;
	struct CUevent_st *events;
	int64_t nr_events;

	/* ---- settings of the tests ---- */
	uint64_t depth;
	/* the device's memory has a boundary every `segment` bytes; 0: none */
	uint64_t segment;
	/* returns the locks that the calling thread holds; NULL: not known */
	int (*nr_locks)(void);
	bool held;
	pthread_t holder; /* the thread that stopped the streams */
	enum { NOBODY, CALLERS, CORE } first;
	uint64_t delay_max, delay_one_in, delay_seed;
	struct fault faults[NR_FAULTS];
	uint64_t fail_copy_at;
	int fail_copy_code;

	/* ---- results for the tests ---- */
	struct count counts[NR_COUNTS]; /* one for each name; never removed */
	uint64_t nr_calls, nr_syncs, nr_hits, nr_copies, bytes_copied;
	/* "not ready" answers in a row, without another call in between */
	uint64_t nr_not_ready[NR_DEVICES];
	bool never_settles;
	char violations[NR_VIOLATIONS][160];
	uint64_t nr_violations;
} fk;

extern __thread int fake__mode; /* of graph captures; 0 = global */

/* All of these are called with the lock held. */
__attribute__((format(printf, 1, 2))) void fake__violated(const char *format, ...);
int fake__enter(const char *name, bool needs_context);
/* Reports a call that is not allowed during a capture to a thread whose mode is not relaxed. */
int fake__unsafe(const char *name, int code);
void fake__spend(uint64_t ns);
uint64_t fake__random(void);
/* Returns the host memory that stands for a device's address; NULL, and a violation, for others. */
const char *fake__memory_of(CUdeviceptr ptr);
/* The calls of this thread since it began. */
extern __thread struct fake__here {
	uint64_t nr_calls, counts[NR_COUNTS]; /* indices as in fk.counts */
} fake__here;

int fake__current_device(void);
bool fake__loses_context(int code);
void fake__check_holder(const char *call);
struct CUstream_st *fake__new_stream(int device, bool of_caller);
void fake__push_op(struct CUstream_st *stream, const struct op *op);
/* Does the same for a call of the driver: returns when the stream has room. */
void fake__queue_op(struct CUstream_st *stream, const struct op *op, const char *call);
void fake__wake_all(void);
bool fake__usable_stream(CUstream stream, const char *call);
struct registration *fake__registration_of(const char *mem, size_t len, bool *straddles);
void fake__spoil(const struct op *op);
bool fake__in_use(const char *mem, size_t len);

#pragma GCC visibility pop

static inline bool is_host(CUstream stream)
{
	return (uintptr_t)stream <= 2;
}

#define BEGIN(name, needs_context)                                                                 \
	int code;                                                                                  \
	pthread_mutex_lock(&fk.mu);                                                                \
	code = fake__enter(name, needs_context);
/* Does the same for a call that must not be made during a graph capture. */
#define BEGIN_UNSAFE(name, needs_context)                                                          \
	BEGIN(name, needs_context)                                                                 \
	code = fake__unsafe(name, code);
#define END                                                                                        \
	pthread_mutex_unlock(&fk.mu);                                                              \
	return code;

#endif
