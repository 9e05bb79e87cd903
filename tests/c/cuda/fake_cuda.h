/* The fake driver's functions for tests; it also has the driver's own. See fake_cuda.c.
 *
 * Tests load the library as the core does, and find these functions by name (X: return type,
 * name, parameters). Python uses ctypes. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stdint.h>

/* A device's address is this much above the host memory that represents it. No process has
 * memory there, so a read by the host crashes. */
#define FAKE_CUDA_DEVICE ((uint64_t)1 << 54)

#define FAKE_CUDA_LIST(X)                                                                               \
	/* No faults, violations, delays, counts; dead devices live. Streams and memory stay. */        \
	X(void, fake_cuda_reset, (void))                                                                \
	/* Forgets what was left on devices that died: registrations, events, streams, contexts. */     \
	X(void, fake_cuda_forget, (void))                                                               \
	/* The nth call of that name (counted from 1 on from now; "*": any call that can fail) and, \
	 * with `sticky`, every later one returns `code`. Up to 16 at a time. */   \
	X(void, fake_cuda_fail, (const char *name, uint64_t nth, int sticky, int code))                 \
	/* The nth copy from now on does not land: the device is dead of `code` then. */                \
	X(void, fake_cuda_fail_copy, (uint64_t nth, int code))                                          \
	X(uint64_t, fake_cuda_hits, (void))              /* faults that acted */                        \
	X(uint64_t, fake_cuda_calls, (const char *name)) /* "*" = all, "sync" = those that wait */      \
	/* Of the calling thread, since it began: "*" or a name. */                                     \
	X(uint64_t, fake_cuda_calls_here, (const char *name))                                           \
	X(uint64_t, fake_cuda_nr_violations, (void))                                                    \
	X(const char *, fake_cuda_violation, (uint64_t i)) /* a sentence */                             \
	X(void, fake_cuda_allow_pageable, (int yes)) /* copies to memory nobody registered */           \
	/* How many operations a stream takes before a call has to wait; 0: as many as a real one. */   \
	X(void, fake_cuda_depth, (uint64_t nr))                                                         \
	/* Batches refuse a copy across a multiple of `len` bytes of a device's memory; 0: none. */     \
	X(void, fake_cuda_segments, (uint64_t len))                                                     \
	/* nr() is how many locks the calling thread holds: none, when it has to wait for room. */      \
	X(void, fake_cuda_watch_locks, (int (*nr)(void)))                                               \
	X(void, fake_cuda_delay, (uint64_t max_ns, uint64_t seed)) /* before things happen */           \
	X(void, fake_cuda_delay_one_in,                                                                 \
	  (uint64_t nr))                   /* only before one thing in so many (< 64) */                \
	X(void, fake_cuda_hold, (int yes)) /* nothing on any stream goes on */                          \
	/* Where a caller's stream and one of the core's could go on, 1: the caller's does, 2: the    \
	 * core's, 0: both. */ \
	X(void, fake_cuda_first, (int who))                                                             \
	X(void, fake_cuda_capture, (void *stream, int yes)) /* the stream captures a graph */           \
	X(void, fake_cuda_activate,                                                                     \
	  (int device, int yes)) /* primary contexts are active at first */                             \
	/* A stream of the caller's, as torch has them, and work on it: fn(arg) runs in its turn. */    \
	X(void *, fake_cuda_stream, (int device))                                                       \
	X(void, fake_cuda_launch, (void *stream, void (*fn)(void *), void *arg))                        \
	X(void, fake_cuda_drain, (void *stream))               /* waits until all of it has run */      \
	X(void, fake_cuda_follow, (void *stream, void *other)) /* stream waits for all of other */      \
	X(void, fake_cuda_freed, (const void *mem, uint64_t len)) /* a violation under a copy */        \
	/* Waits until lanes only poll: whatever they could do they have done. For use while held,    \
	 * with copies in flight. */ \
	X(void, fake_cuda_settle, (void))                                                               \
	/* Counts live objects: "streams", "events", "registered", "allocated", "contexts", and    \
	 * contexts that threads have "pushed". */    \
	X(int64_t, fake_cuda_live, (const char *what))                                                  \
	X(uint64_t, fake_cuda_copied_bytes, (void))

#endif
