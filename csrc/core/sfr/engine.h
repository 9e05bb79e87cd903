/* An engine: the threads, slots and pool that saves use. engine/engine.c implements it. */
#ifndef SFR_ENGINE_PUBLIC_H
#define SFR_ENGINE_PUBLIC_H

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

struct sfr_engine;

struct sfr_engine_opts {
	uint64_t pool_bytes;    /* cap of the pool; 0: a default pool, see budget_bytes */
	uint64_t block_bytes;   /* a multiple of 4096, > 0 */
	uint32_t nr_writers;    /* >= 1 */
	uint32_t max_in_flight; /* >= 1 */
	/* 1: other processes can map the pool (sfr_snapshot_locate_in_file) */
	uint32_t shared_memory;
	uint32_t nr_copiers; /* threads that help with a copy while a call or a step waits */
	/* All default pools of the process share budget_bytes. A new one gets what is left of them
	 * as its cap: at most most_bytes, at least one block, and halved until the system accepts
	 * it. */
	uint64_t budget_bytes, most_bytes;
};

struct sfr_stats {
	uint64_t pool_bytes, block_bytes;
	uint64_t committed_bytes; /* memory that the pool has obtained from the system */
	uint64_t leased_bytes;    /* of committed_bytes: what saves and snapshots have now */
	uint64_t save_bytes;      /* of leased_bytes: what saves have */
	uint64_t retired_bytes;   /* never used again: a failed device may still write to it */
	/* a save of several files, or to a store, counts once */
	uint64_t saves_in_flight, saves_total;
};

/* Returns how many bytes all pools of this process have obtained from the system. */
uint64_t sfr_pools_committed_bytes(void);

/* Makes an engine without starting a thread. Returns 0, or:
 *
 *   -EINVAL          an option is out of range
 *   -EFBIG           shared memory: RLIMIT_FSIZE is less than the pool
 *   -ENOMEM, -errno  of memfd_create and others */
int sfr_engine_new(const struct sfr_engine_opts *opts, struct sfr_engine **out);
/* Waits for the engine's saves and for the process's removes, then stops the threads and frees the
 * pool. Returns 0, SFR_EAGAIN or SFR_EFORK. New saves fail as soon as this was called once.
 *
 * Does not wait for a save that the calling thread is still capturing, because a signal handler may
 * call this function. Threads and pool then stay until the last such save has ended. */
int sfr_engine_close(struct sfr_engine *engine, uint64_t slice_ns);
void sfr_engine_put(struct sfr_engine *engine); /* drops sfr_engine_new's reference; accepts NULL */
int sfr_engine_stats(struct sfr_engine *engine, struct sfr_stats *out); /* 0 or SFR_EFORK */
/* Obtains memory for the pool's first `nbytes` bytes (at most its cap) before a save needs it.
 * Returns 0, -errno, SFR_EFORK or SFR_ECLOSED. */
int sfr_engine_warm_up(struct sfr_engine *engine, uint64_t nbytes);
/* Gives the system the memory of blocks that are not leased. Returns 0, -errno, SFR_EFORK or
 * SFR_ECLOSED. */
int sfr_engine_trim(struct sfr_engine *engine);
/* Prepares the engine for CUDA: makes the device's lane, and lets sfr_engine_warm_up pin memory for
 * the device. Returns 0, -errno, SFR_EFORK or SFR_ECLOSED. After an error `why` may have a sentence
 * that explains it. */
int sfr_engine_use_device(struct sfr_engine *engine, uint32_t device, char *why, size_t why_len);

/* The slot of a save that the core does not write. It counts against max_in_flight and in the
 * statistics, and sfr_engine_close waits for it. */
struct sfr_slot;
/* Takes a slot, which the caller owns. `flags`: SFR_SAVE_NESTED and SFR_SAVE_NO_WAIT, as for a
 * save. Returns 0, SFR_EAGAIN, SFR_EBUSY (with NO_WAIT), SFR_ECLOSED, SFR_EFORK or -ENOMEM. */
int sfr_slot_take(struct sfr_engine *engine, uint32_t flags, uint64_t slice_ns,
		  struct sfr_slot **out);
/* Records that the user's call that took the slot is over. From now on sfr_engine_close waits for
 * the slot even on the thread that took it. */
void sfr_slot_mark_launched(struct sfr_slot *slot);
/* Gives the slot back. May be called again; does nothing in a forked child. */
void sfr_slot_give_back(struct sfr_slot *slot);
/* Returns whether the slot was given back. */
bool sfr_slot_is_given_back(struct sfr_slot *slot);
void sfr_slot_free(struct sfr_slot *slot); /* gives it back and frees it; accepts NULL */

/* Writes a description of the CUDA driver, and of devices that have failed for good, to `text` of
 * `len` bytes. Loads the driver but does not initialise it. Returns 0 or SFR_EFORK. */
int sfr_engine_describe_driver(struct sfr_engine *engine, char *text, size_t len);

#endif
