/* An engine: threads, slots and a pool for saves. See engine/engine.c. */
#ifndef SFR_ENGINE_PUBLIC_H
#define SFR_ENGINE_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

struct sfr_engine;

struct sfr_engine_opts {
	uint64_t pool_bytes;    /* cap of the pool; 0 = the default cap */
	uint64_t block_bytes;   /* multiple of 4096, > 0 */
	uint32_t nr_writers;    /* >= 1 */
	uint32_t max_in_flight; /* >= 1 */
	uint32_t shared_memory; /* other processes can map the pool: sfr_snapshot_file */
};

struct sfr_stats {
	uint64_t pool_bytes, block_bytes;
	uint64_t committed_bytes; /* memory the pool holds from the system */
	uint64_t leased_bytes;    /* of it, handed out at this moment */
	uint64_t save_bytes;      /* of that, to saves; the rest is snapshots' */
	uint64_t retired_bytes;   /* of it, never to be used again */
	uint64_t saves_in_flight, saves_total;
};

/* Memory that a default pool may take: half of what the machine and the cgroup
 * leave, divided by LOCAL_WORLD_SIZE; what default pools already took is
 * subtracted (default caps share one budget). At least one block. */
uint64_t sfr_default_pool_bytes(uint64_t block_bytes);

/* Makes an engine; starts no thread yet. -EINVAL: an option out of range. With shared memory -errno of
 * memfd_create, and -EFBIG: RLIMIT_FSIZE is less than the pool. */
int sfr_engine_new(const struct sfr_engine_opts *opts, struct sfr_engine **out);
/* Waits for the engine's saves and for the process's removes, then stops its
 * threads and gives the pool back. New saves are refused from the first call on.
 * Idempotent. Saves still being captured by the calling thread are not waited
 * for (a signal handler may call this in the middle of one): then threads and
 * pool stay until the last of those has ended. */
int sfr_engine_close(struct sfr_engine *engine, uint64_t slice_ns);
void sfr_engine_put(struct sfr_engine *engine); /* drops the maker's reference; NULL is fine */
int sfr_engine_stats(struct sfr_engine *engine, struct sfr_stats *out);
int sfr_engine_warm_up(struct sfr_engine *engine, uint64_t nbytes);
int sfr_engine_trim(struct sfr_engine *engine);
/* For a process that uses CUDA: makes the lane of a device and has warm_up pin what it gives memory
 * to. 0, or -errno with a sentence in `why`. */
int sfr_engine_use_device(struct sfr_engine *engine, uint32_t device, char *why, size_t why_len);
/* A slot for a save whose bytes the engine does not write: it counts among max_in_flight and in the
 * figures, and close waits until it is given back. The caller owns what it gets. Flags are
 * SFR_SAVE_NESTED and SFR_SAVE_NO_WAIT, as for a save. 0; SFR_EAGAIN: the slice has passed; SFR_EBUSY,
 * SFR_ECLOSED, SFR_EFORK, -ENOMEM. */
struct sfr_slot;
int sfr_slot_take(struct sfr_engine *engine, uint32_t flags, uint64_t slice_ns,
		  struct sfr_slot **out);
/* The call that took it is over: from now on close waits for it in that thread too. */
void sfr_slot_launched(struct sfr_slot *slot);
/* The save has ended. May be called again; a forked child changes nothing. */
void sfr_slot_give_back(struct sfr_slot *slot);
void sfr_slot_put(struct sfr_slot *slot); /* gives it back and frees it; NULL is fine */
/* A sentence on the CUDA driver and on devices that are dead. Loads the driver, never starts it. */
int sfr_engine_driver(struct sfr_engine *engine, char *text, size_t len);

#endif
