/* The log of renames, removes and loads, for the rest of the core. log.c implements it. */
#ifndef SFR_LOG_H
#define SFR_LOG_H

#include <stdatomic.h>

#include "sfr/log.h"
#include "base/base.h"

struct sfr__log_entry;

/* A kind of entry: a save, a remove, or external work. */
struct sfr__log_ops {
	bool creates;         /* true: makes a file or link of its name; false: removes the name */
	bool is_save;         /* a save: later removes do not run if it fails */
	bool close_waits;     /* closing an engine waits for the entry */
	bool makes_directory; /* makes a directory with all its contents */
	/* Does the entry's work, a rename or a remove, on a thread of the log. Called without the
	 * log's lock. Calls sfr__log_mark_ended, unless another thread does so later.
	 * `last_save_ok`: the last save before the entry succeeded, or there was none. NULL for
	 * external work, which is not done by the log. */
	void (*run)(struct sfr__log_entry *entry, bool last_save_ok);
	/* Called when the log does not use the entry any more, so that it can be freed. Called on a
	 * thread of the log, without the log's lock. */
	void (*release)(struct sfr__log_entry *entry);
	/* Returns when the writers of a save that is not ready began to wait for its file system
	 * (a time of sfr__now_ns), or 0 if they are not waiting. Called with the log's lock; takes
	 * no lock. NULL: the entry has no writers. */
	uint64_t (*fs_wait_since)(const struct sfr__log_entry *entry);
};

enum sfr__log_entry_state {
	SFR__LOG_WAITING,   /* a save that is not synced, or external work behind the head */
	SFR__LOG_READY,     /* can run when it is the head; external work: it is the head */
	SFR__LOG_RUNNING,   /* a thread is working on it */
	SFR__LOG_SUCCEEDED, /* ended with success */
	SFR__LOG_FAILED,    /* ended with an error: its name is unchanged */
};

/* An entry of the process's log, embedded in the object that it is about, such as a ticket. */
struct sfr__log_entry {
	/* constant */
	const struct sfr__log_ops *ops;
	char *key;       /* the path that the entry concerns (sfr/log.h) */
	uint64_t number; /* for external work: its number in sfr__log_take_external_work */
	uint64_t fs;     /* the file system: st_dev of the directory; 0: unknown */
	/* guarded by the log's mutex */
	struct sfr__log_entry *next;
	uint64_t seq; /* its position: 1, 2, ... in the order of submission */
	enum sfr__log_entry_state state;
	struct sfr_log_load *loads; /* a list of files to open when this entry has ended */
	/* While a thread of the log works on this entry: the time since which the thread waits for
	 * the entry's file system. Else 0. Only that thread writes it, also without the mutex. */
	_Atomic uint64_t fs_wait_since_ns;
	bool hang_reported; /* a notice has said that the entry's file system does not answer */
};

/* Reserves room for one entry: starts the log's thread if there is none, so that a later
 * sfr__log_append cannot fail. The thread runs at least until sfr__log_append uses the reservation,
 * or sfr__log_unreserve gives it up. Returns 0 or -errno. */
int sfr__log_reserve(void);
void sfr__log_unreserve(void);
/* Appends an entry whose ops, key and state are set, and uses up a reservation. The caller keeps
 * the entry alive until ops->release is called. Returns its sequence number. */
uint64_t sfr__log_append(struct sfr__log_entry *entry);
/* Makes a waiting entry ready. Does nothing in any other state. */
void sfr__log_mark_ready(struct sfr__log_entry *entry);
/* Sets the state to SUCCEEDED or FAILED. Only the first call for an entry counts. */
void sfr__log_mark_ended(struct sfr__log_entry *entry, bool succeeded);
/* Returns the sequence number of the last entry that closing an engine waits for, or 0. */
uint64_t sfr__log_seq_awaited_by_close(void);
/* Waits until the head is external work that no caller has taken, and takes it. Sets *number to the
 * entry's number, and *last_save_ok as for ops->run. Returns 0, SFR_EAGAIN, or SFR_ECLOSED when the
 * log is being stopped. */
int sfr__log_take_external_work(uint64_t slice_ns, uint64_t *number, bool *last_save_ok);

#endif
