/* One save. save/ticket.c describes its states. */
#ifndef SFR_SAVE_PUBLIC_H
#define SFR_SAVE_PUBLIC_H

#include "sfr/err.h"
#include "sfr/source.h"
#include "sfr/state.h"

struct sfr_engine;
struct sfr_ticket;

#define SFR_SAVE_DURABLE 1u /* sync the file and its directory */
#define SFR_SAVE_NESTED 2u  /* made inside another call of this thread: never waits for a slot */
/* compare a checksum of all deferred bytes, computed in the call, with that of the copies */
#define SFR_SAVE_CHECK_BYTES 4u
#define SFR_SAVE_NO_WAIT 8u /* return SFR_EBUSY instead of waiting for a slot */
/* rename the file when it is synced; the save is neither in the log nor counted in max_in_flight */
#define SFR_SAVE_UNORDERED 16u
/* write no file, but hand the bytes to the caller (sfr/stream.h); such a save is unordered */
#define SFR_SAVE_STREAM 32u

struct sfr_save_desc {
	const char *dir;  /* real path of the directory */
	const char *name; /* file name in it */
	uint64_t fs;      /* the directory's file system, as from sfr_resolve; 0: unknown */
	/* data.pkl, or the header of a flat file; valid until the save is staged or has ended */
	const void *skeleton;
	uint64_t skeleton_len;
	/* the array is copied in the call; the sources' memory must stay valid like the skeleton */
	const struct sfr_source *sources;
	uint32_t nr_sources;
	uint32_t flags; /* SFR_SAVE_* */
	/* NULL: torch's format. Else a flat file: the skeleton, then these members in this order,
	 * without a gap. The array is read in the call. */
	const struct sfr_member *members;
	uint32_t nr_members;
};

/* Makes a ticket and lays out its image without I/O. Returns 0, -ENOMEM, -EINVAL or SFR_EFORK. */
int sfr_save_new(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		 struct sfr_ticket **out);

/* Marks the state to be saved, by an event on the caller's stream of each device. Called before
 * sfr_save_admit. Does nothing without sources on devices. Returns 0, or SFR_ECAPTURING (a stream
 * is capturing a graph), SFR_ECLOSED or SFR_ESTATE: then the caller abandons the save. Any other
 * failure is stored in the ticket, and the save fails once it is admitted. */
int sfr_save_begin_transfers(struct sfr_ticket *t, const struct sfr_device_stream *streams,
			     uint32_t nr_streams);
/* Takes one of the engine's max_in_flight slots and has a writer open the file. Returns 0,
 * SFR_EAGAIN, SFR_EBUSY (with SFR_SAVE_NO_WAIT) or SFR_ECLOSED. After a failure the caller must
 * abandon the save if another thread may be waiting for it. */
int sfr_save_admit(struct sfr_ticket *t, uint64_t slice_ns);
/* Copies the captured sources and takes samples of the deferred ones. Returns 0, or:
 *
 *   SFR_EAGAIN       there are no blocks now
 *   SFR_EEXHAUSTED   snapshots hold all blocks: the caller abandons the save
 *
 * Any other failure is stored in the ticket, and the call returns 0. */
int sfr_save_capture(struct sfr_ticket *t, uint64_t slice_ns);
/* Submits the save: appends it to the process's log, unless it is unordered, and hands it to its
 * lanes. Never waits. Returns 0 or SFR_ESTATE. */
int sfr_save_launch(struct sfr_ticket *t);
/* Gives up a save that was not launched. The save ends as cancelled. */
void sfr_save_abandon(struct sfr_ticket *t);

enum sfr_wait_for {
	SFR_WAIT_COPIED, /* every deferred byte is copied: the sources are no longer read */
	SFR_WAIT_STAGED,
	SFR_WAIT_ENDED,
};
/* Waits until the save has reached a point; an ended save has reached all three. Returns 0 or
 * SFR_EAGAIN. A slice of zero never sleeps, and for SFR_WAIT_ENDED takes no lock. */
int sfr_save_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t slice_ns);
/* Returns 1 if the save has reached that point, else 0. For a failing save the result may stay 0
 * until the save has ended. Takes no lock, because Python calls it under the interpreter lock. */
int sfr_save_has_reached(const struct sfr_ticket *t, enum sfr_wait_for what);
/* The gate: after it an optimizer step may change the sources. Waits until the sources in host
 * memory are copied. Makes the given streams of the calling thread wait for the copies from
 * devices; the caller itself waits for these only while blocks are missing, while a stream captures
 * a graph, or if a device has no stream in the list. Returns 0, or SFR_EAGAIN: call again. */
int sfr_save_gate(struct sfr_ticket *t, const struct sfr_device_stream *streams,
		  uint32_t nr_streams, uint64_t slice_ns);
/* Gives the save the verdict of the version counters. `torn_index` is the index of a source that
 * changed before it was copied: the save then fails with SFR_ETORN. -1: none changed. Called after
 * SFR_WAIT_COPIED or sfr_save_gate. Returns 0 the first time, later SFR_ESTATE. */
int sfr_save_give_verdict(struct sfr_ticket *t, int64_t torn_index);
/* Returns 1 if the save ends as cancelled, 0 if it is too late, or SFR_EFORK. A save may be
 * cancelled before it is admitted. */
int sfr_save_cancel(struct sfr_ticket *t);

/* Fallbacks that a report explains with a sentence each. */
enum sfr_fallback {
	SFR_FALLBACK_BUFFERED, /* why the file went through the page cache */
	SFR_FALLBACK_UNSYNCED, /* why the directory was not synced */
	SFR_FALLBACK_PAGEABLE, /* why pool memory was not pinned */
	SFR_FALLBACK_COPIES,   /* why copies from a device were slower than they could be */
	SFR_NR_FALLBACKS
};

struct sfr_report {
	enum sfr_state state;
	struct sfr_err err;
	uint64_t nbytes; /* length of the file */
	uint64_t captured_nbytes, deferred_nbytes;
	uint64_t peak_pool_bytes; /* the most that this save had of the pool at one time */
	uint64_t slot_wait_ns;    /* time in sfr_save_admit */
	uint64_t block_wait_ns;   /* time in sfr_save_capture spent waiting for blocks */
	/* when the save reached these points; 0: not yet */
	uint64_t created_ns, launched_ns, staged_ns, ended_ns;
	uint32_t io_mode;                     /* SFR_IO_* */
	uint32_t over_slots;                  /* 1: its slot exceeds max_in_flight */
	char fallback[SFR_NR_FALLBACKS][160]; /* one sentence each, "" when unused */
};
/* Fills *out, at any time. Returns 0 or SFR_EFORK. */
int sfr_save_report(struct sfr_ticket *t, struct sfr_report *out);
/* These two never wait, not even for a lock. Return 0 or SFR_EFORK. *staged is nonzero if the save
 * was staged and has not failed since. */
int sfr_save_state(const struct sfr_ticket *t, enum sfr_state *state, int *staged);
int sfr_save_progress(const struct sfr_ticket *t, uint64_t *written_nbytes, uint64_t *nbytes);
uint64_t sfr_ticket_number(const struct sfr_ticket *t); /* from 1, unique in the process */

void sfr_ticket_get(struct sfr_ticket *t);
void sfr_ticket_put(struct sfr_ticket *t); /* accepts NULL */

#endif
