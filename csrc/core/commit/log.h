/* The order of renames, removes and loads. log.c implements it. */
#ifndef SFR_LOG_H
#define SFR_LOG_H

#include <stdatomic.h>

#include "sfr/log.h"
#include "base/base.h"

struct sfr__log_entry;

/* The kind of an entry: a save, a remove, or external work. The log knows no more about it. */
struct sfr__log_ops {
	bool creates; /* the entry makes its name (a save, a link); otherwise it removes the name */
	bool is_save; /* a later remove depends on its result */
	bool close_waits; /* closing an engine waits for it */
	bool has_below;   /* it also makes what is below its name: a directory (a remove always
			   * concerns that) */
	/* Runs a ready entry that is the head or may overtake, on a thread of the log without its
	 * lock. This or a later call ends with sfr__log_ended. NULL: external work. */
	void (*run)(struct sfr__log_entry *entry, bool after_good);
	/* Called when the entry has left the log and may be freed, on a thread of the log without
	 * its lock. */
	void (*left)(struct sfr__log_entry *entry);
	/* Returns since when (sfr__now_ns) the entry, before it is ready, has been waiting for its
	 * file system, or 0. Called on any thread with the log's lock, so it takes no lock. NULL:
	 * never. */
	uint64_t (*asked_since)(const struct sfr__log_entry *entry);
};

enum sfr__log_state {
	SFR__LOG_WAITING, /* not ready, or external work that is not the head */
	SFR__LOG_READY,   /* runs as soon as it is the head; external work can be taken */
	SFR__LOG_RUNNING, /* a thread is working on it */
	SFR__LOG_WELL,    /* ended with success */
	SFR__LOG_BADLY,   /* ended, and its name is unchanged */
};

/* An entry of the process's log, embedded in what it does. */
struct sfr__log_entry {
	const struct sfr__log_ops *ops; /* constant, like the next three */
	char *key;
	uint64_t number; /* as returned by sfr__log_take_work */
	uint64_t fs;     /* st_dev of the directory; 0: unknown, and never set aside */
	/* guarded by the log's mutex */
	struct sfr__log_entry *next;
	uint64_t seq;
	enum sfr__log_state state;
	struct sfr_log_load *loads; /* opened when this entry has ended */
	/* When a thread of the log began to wait for the file system of this entry; 0: no thread
	 * waits. Only that thread writes it, and after each answer it does so without the lock. */
	_Atomic uint64_t asked_ns;
	bool notified; /* a notice said that its file system was set aside */
};

/* Reserves an entry: starts the log's thread if needed, which runs until the reservation is used or
 * given up. So an append that was promised cannot fail. 0 or -errno. */
int sfr__log_reserve(void);
void sfr__log_unreserve(void);
/* Appends an entry whose ops, key and state are set, using a reservation. The caller owns it until
 * it has left. Returns its sequence number. */
uint64_t sfr__log_append(struct sfr__log_entry *entry);
/* Changes WAITING to READY. */
void sfr__log_ready(struct sfr__log_entry *entry);
/* Ends the entry; only the first call counts. */
void sfr__log_ended(struct sfr__log_entry *entry, bool well);
/* Returns the sequence number of the last entry that a close waits for, or 0. */
uint64_t sfr__log_close_seq(void);
/* Waits until the head is external work that nobody has taken, takes it and returns its number. The
 * entry may leave the log and be freed as soon as the lock is released. SFR_EAGAIN; SFR_ECLOSED
 * when the log is being stopped. *after_good: the last save before it succeeded. */
int sfr__log_take_work(uint64_t slice_ns, uint64_t *number, bool *after_good);
/* Copies a key for an entry. NULL without memory. */
char *sfr__log_copy_key(const char *key);

#endif
