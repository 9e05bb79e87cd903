/* The log of renames, removes and loads, for the rest of the core. log.c implements it. */
#ifndef SFR_LOG_H
#define SFR_LOG_H

#include <stdatomic.h>

#include "sfr/log.h"
#include "base/base.h"

struct sfr__log_entry;

/* A kind of entry: a save, a remove, or external work. */
struct sfr__log_ops {
	bool creates;     /* the entry makes its name (a save, a link); else it removes the name */
	bool is_save;     /* a later remove runs only if this entry succeeds */
	bool close_waits; /* closing an engine waits for the entry */
	bool makes_directory; /* the entry makes a directory with its contents */
	/* Runs a ready entry that is the head or may overtake, on a thread of the log without the
	 * log's lock. Calls sfr__log_ended, or leaves that to another thread. `after_good`: the
	 * last save before the entry succeeded, or there was none. NULL: external work, which the
	 * log does not run. */
	void (*run)(struct sfr__log_entry *entry, bool after_good);
	/* Called when the entry has left the log and may be freed, on a thread of the log without
	 * the log's lock. */
	void (*left)(struct sfr__log_entry *entry);
	/* Returns the time (sfr__now_ns) since which the writers of an entry that is not ready have
	 * been waiting for its file system, or 0. Called with the log's lock; takes no lock. NULL:
	 * the entry has no writers. */
	uint64_t (*asked_since)(const struct sfr__log_entry *entry);
};

enum sfr__log_state {
	SFR__LOG_WAITING,   /* not ready, or external work that is not the head */
	SFR__LOG_READY,     /* runs as soon as it is the head; external work: is the head */
	SFR__LOG_RUNNING,   /* a thread is working on it */
	SFR__LOG_SUCCEEDED, /* ended with success */
	SFR__LOG_FAILED,    /* ended, and its name is unchanged */
};

/* An entry of the process's log, embedded in the object that it is about, such as a ticket. */
struct sfr__log_entry {
	/* constant */
	const struct sfr__log_ops *ops;
	char *key;       /* the path that the entry concerns (sfr/log.h) */
	uint64_t number; /* external work: as returned by sfr__log_take_work */
	uint64_t fs;     /* st_dev of the directory; 0: unknown, and never set aside (aside.c) */
	/* guarded by the log's mutex */
	struct sfr__log_entry *next;
	uint64_t seq; /* its position: 1, 2, ... in the order of submission */
	enum sfr__log_state state;
	struct sfr_log_load *loads; /* opened when this entry has ended */
	/* While a thread of the log works on this entry: the time since which the thread waits for
	 * the entry's file system; else 0. Only that thread writes it, also without the mutex. */
	_Atomic uint64_t asked_ns;
	bool notified; /* a notice said that the entry's file system was set aside */
};

/* Starts the log's thread if there is none, so that a later sfr__log_append cannot fail. The thread
 * does not end before the reservation is used by sfr__log_append or given up with
 * sfr__log_unreserve. Returns 0 or -errno. */
int sfr__log_reserve(void);
void sfr__log_unreserve(void);
/* Appends an entry whose ops, key and state are set, and uses up a reservation. The caller keeps
 * the entry alive until ops->left is called. Returns its sequence number. */
uint64_t sfr__log_append(struct sfr__log_entry *entry);
/* Makes a waiting entry ready. Does nothing in any other state. */
void sfr__log_ready(struct sfr__log_entry *entry);
/* Ends the entry, as SUCCEEDED if `good`, else as FAILED. Only the first call counts. */
void sfr__log_ended(struct sfr__log_entry *entry, bool good);
/* Returns the sequence number of the last entry that a close waits for, or 0. */
uint64_t sfr__log_close_seq(void);
/* Waits until the head is external work, and takes the work. Sets *number to the entry's number and
 * *after_good as for ops->run. Each work is taken once. Returns 0, SFR_EAGAIN, or SFR_ECLOSED when
 * the log is being stopped. */
int sfr__log_take_work(uint64_t slice_ns, uint64_t *number, bool *after_good);

#endif
