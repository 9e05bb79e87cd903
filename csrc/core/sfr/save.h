/* One save. See save/ticket.c. */
#ifndef SFR_SAVE_PUBLIC_H
#define SFR_SAVE_PUBLIC_H

#include "sfr/err.h"
#include "sfr/source.h"
#include "sfr/state.h"

struct sfr_engine;
struct sfr_ticket;

#define SFR_SAVE_DURABLE 1u /* sync file and directory */
#define SFR_SAVE_NESTED 2u  /* made inside another call of this thread: never waits for a slot */
#define SFR_SAVE_CHECK_BYTES 4u /* checksum each deferred byte in the call, compare when staged */
#define SFR_SAVE_NO_WAIT 8u     /* SFR_EBUSY instead of a wait for a slot */
#define SFR_SAVE_UNORDERED 16u  /* renamed once synced: no place in the log, and slots apart */

struct sfr_save_desc {
	const char *dir;      /* real path of the directory */
	const char *name;     /* file name in it */
	uint64_t fs;          /* its file system, as sfr_look says; 0 = not known */
	const void *skeleton; /* data.pkl; stays valid until the save is staged or has ended */
	uint64_t skeleton_len;
	const struct sfr_source *sources; /* copied; the bytes stay valid until staged or ended */
	uint32_t nr_sources;
	uint32_t flags;
};

/* Lays out the image of a save. No I/O, no wait. -ENOMEM, -EINVAL. */
int sfr_save_new(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		 struct sfr_ticket **out);

/* Marks the state that is saved: an event on the caller's stream of each device, before which
 * nothing of the save is copied. Called before sfr_save_admit; without sources on devices it does
 * nothing. SFR_ECAPTURING where a stream is capturing a graph, SFR_ECLOSED: both end the ticket.
 * Any other failure (no driver, a dead device) becomes the ticket's own: 0 is returned, and the
 * save fails as soon as it is admitted. */
int sfr_save_begin(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams);
/* Takes one of the engine's max_in_flight slots and has a writer open the file.
 * SFR_EAGAIN, SFR_EBUSY (with SFR_SAVE_NO_WAIT), SFR_ECLOSED. A failure here ends the
 * ticket: only sfr_ticket_put may follow. */
int sfr_save_admit(struct sfr_ticket *t, uint64_t slice_ns);
/* Copies the captured sources, takes samples of the deferred ones. SFR_EAGAIN while it
 * waits for blocks; SFR_EEXHAUSTED when snapshots hold them all (then abandon the save). Other
 * failures become the ticket's own: 0 is returned. */
int sfr_save_capture(struct sfr_ticket *t, uint64_t slice_ns);
/* Appends the save to the process's log, unless unordered, and hands it to its lanes: the moment of
 * submission. Never waits. Fails only on SFR_ESTATE. */
int sfr_save_launch(struct sfr_ticket *t);
/* Gives a save up that was admitted but not launched (an exception in the caller). */
void sfr_save_abandon(struct sfr_ticket *t);

enum sfr_wait_for { SFR_WAIT_COPIED, SFR_WAIT_STAGED, SFR_WAIT_ENDED };
/* Waits until every deferred byte is copied (the sources are no longer read); until staged;
 * or until the save has ended. An ended save satisfies all three. Returns 0 or SFR_EAGAIN. A slice
 * of zero never sleeps, and for the end it takes no lock either. */
int sfr_save_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t slice_ns);
/* Whether that is known without a lock. Python asks with the interpreter lock held, and whoever has
 * the engine's may be a niced thread that another process keeps from running. */
int sfr_save_reached(const struct sfr_ticket *t, enum sfr_wait_for what);
/* The gate of the next step. Host sources: waits until they are copied, as SFR_WAIT_COPIED does.
 * Sources on devices: has their copies queued, all of them, and these streams of the calling
 * thread wait for them; the host waits only while blocks are wanting, where a stream is capturing
 * a graph, or where a device has no stream in the list. 0, SFR_EAGAIN; call it again then. */
int sfr_save_gate(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams,
		  uint64_t slice_ns);
/* The caller's verdict on what the core cannot see (tensor version counters): given once,
 * after SFR_WAIT_COPIED or sfr_save_gate. torn_index < 0 passes; otherwise the save fails with SFR_ETORN.
 * A second verdict is ignored and SFR_ESTATE returned. */
int sfr_save_confirm(struct sfr_ticket *t, int64_t torn_index);
/* 1: the save will end as cancelled (or already has); 0: too late. */
int sfr_save_cancel(struct sfr_ticket *t);

/* What a report has a sentence on. */
enum sfr_fallback {
	SFR_FALLBACK_BUFFERED, /* why the file went through the page cache */
	SFR_FALLBACK_UNSYNCED, /* why its directory was not synced */
	SFR_FALLBACK_PAGEABLE, /* why memory of the pool was not pinned */
	SFR_FALLBACK_COPIES,   /* why copies from a device did not go the best way */
	SFR_NR_FALLBACKS
};

struct sfr_report {
	enum sfr_state state;
	struct sfr_err err;
	uint64_t nbytes; /* length of the file */
	uint64_t captured_nbytes, deferred_nbytes;
	uint64_t peak_pool_bytes;
	uint64_t slot_wait_ns;                                 /* in sfr_save_admit */
	uint64_t block_wait_ns;                                /* in sfr_save_capture, for blocks */
	uint64_t created_ns, launched_ns, staged_ns, ended_ns; /* 0 = not yet */
	uint32_t io_mode;                                      /* SFR_IO_* */
	uint32_t over_slots;                  /* 1: a nested save beyond max_in_flight */
	char fallback[SFR_NR_FALLBACKS][160]; /* sentences, "" when unused */
};
int sfr_save_report(struct sfr_ticket *t, struct sfr_report *out);
/* These two never wait, not even for a lock. 0 or SFR_EFORK. `staged`: it is, and has not failed. */
int sfr_save_state(const struct sfr_ticket *t, enum sfr_state *state, int *staged);
int sfr_save_progress(const struct sfr_ticket *t, uint64_t *written_nbytes, uint64_t *nbytes);
uint64_t sfr_ticket_number(const struct sfr_ticket *t); /* from 1, of the process; trace.h */

void sfr_ticket_get(struct sfr_ticket *t);
void sfr_ticket_put(struct sfr_ticket *t); /* NULL is fine */

#endif
