/* Shared by the files of the fake driver: its state, and how a call begins and ends. fake_cuda.c
 * has the picture. */
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
#define CALL_NS 2000             /* what a call takes */
#define COPY_NS 1500             /* what a copy takes before its first byte */
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

/* Handles are never freed, so that the use of one that was destroyed is seen; destroyed streams
 * go to a list of their own, so that walks over the living ones stay short. */
struct CUevent_st {
	struct CUevent_st *next;
	bool alive;
	int device;
	uint64_t recorded, completed; /* generations */
	bool of_caller;               /* its last recording was on a caller's stream */
	bool waited;                  /* for its last recording */
	bool timing;
	uint64_t at_ns; /* timing: when its last recording completed */
};

struct CUstream_st {
	struct CUstream_st *next;
	bool alive, of_caller, capturing, knows_caller;
	bool busy;             /* in an operation */
	uint64_t nr_ops;       /* taken and not yet run */
	bool flushed, dropped; /* once destroyed: its last copies are to land; nothing is to */
	int device;
	const struct op *wait; /* the operation it is in waits, for an event */
	struct op *head, *tail;
	struct op *queued; /* copies that have had their turn and wait for an event */
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

/* Nothing of what follows is seen outside the library. */
#pragma GCC visibility push(hidden)

extern struct fake__state {
	pthread_mutex_t mu; /* guards everything */
	pthread_cond_t cv;  /* something has run */
	pid_t owner;
	struct CUctx_st contexts[NR_DEVICES];
	int retained[NR_DEVICES];
	int64_t nr_pushed;       /* contexts, by all threads */
	int dead_of[NR_DEVICES]; /* the code that killed it, or 0 */
	bool inactive[NR_DEVICES];
	bool initialised, pageable_allowed, host_capturing;
	struct CUstream_st *streams, *ended_streams;
	struct registration *registrations;
	struct CUevent_st *events;
	int64_t nr_events;

	/* what tests ask for */
	uint64_t depth;
	uint64_t segment;      /* memory of a device has an edge every so many bytes; 0: none */
	int (*nr_locks)(void); /* locks that the calling thread holds; NULL: not known */
	bool held;
	pthread_t holder; /* who let nothing go on */
	enum { NOBODY, CALLERS, CORE } first;
	uint64_t delay_max, delay_one_in, delay_seed;
	struct fault faults[NR_FAULTS];
	uint64_t fail_copy_at;
	int fail_copy_code;

	/* what they look at */
	struct count counts[NR_COUNTS]; /* of a name each; those stay */
	uint64_t nr_calls, nr_syncs, nr_hits, nr_copies, bytes_copied;
	uint64_t nr_not_ready[NR_DEVICES]; /* queries that said so, with no other call in between */
	bool never_settles;
	char violations[NR_VIOLATIONS][160];
	uint64_t nr_violations;
} fk;

extern __thread int fake__mode; /* of graph captures; 0 = global */

/* All of these are called with the lock. */
__attribute__((format(printf, 1, 2))) void fake__violated(const char *format, ...);
int fake__enter(const char *name, bool needs_context);
/* Makes a call one that a thread whose mode is not relaxed may not make beside a capture. */
int fake__unsafe(const char *name, int code);
void fake__spend(uint64_t ns);
uint64_t fake__random(void);
/* The host's memory behind an address of a device; NULL, and a violation, for any other. */
const char *fake__memory_of(CUdeviceptr ptr);
/* The calls of the calling thread, since it began. */
extern __thread struct fake__here {
	uint64_t nr_calls, counts[NR_COUNTS]; /* at the places that names have in fk.counts */
} fake__here;

int fake__current_device(void);
bool fake__loses_context(int code);
void fake__check_holder(const char *call);
struct CUstream_st *fake__new_stream(int device, bool of_caller);
void fake__push_op(struct CUstream_st *stream, const struct op *op);
/* The same for a call of the driver's: it returns when the stream has room. */
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
/* The same for a call that must not be made beside a capture of a graph. */
#define BEGIN_UNSAFE(name, needs_context)                                                          \
	BEGIN(name, needs_context)                                                                 \
	code = fake__unsafe(name, code);
#define END                                                                                        \
	pthread_mutex_unlock(&fk.mu);                                                              \
	return code;

#endif
