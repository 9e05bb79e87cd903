/* The order of renames, removes and loads. See log.c. */
#ifndef SFR_LOG_H
#define SFR_LOG_H

#include <stdatomic.h>

#include "sfr/log.h"
#include "base/base.h"

struct sfr__log_entry;

/* What an entry stands for: a save, a remove, work of others. The log knows no more of it. */
struct sfr__log_ops {
	bool creates;     /* it makes its name (a save, a link), or takes it away */
	bool is_save;     /* a remove behind it depends on how it ended */
	bool close_waits; /* closing an engine waits for it */
	/* On a thread of the log, without its lock, when a ready entry's turn has come: does what there
	 * is to do. Who does it, or somebody later, calls sfr__log_ended. NULL: somebody takes its turn. */
	void (*run)(struct sfr__log_entry *entry, bool after_good);
	/* The entry has left the log and may be freed. A thread of the log, without its lock. */
	void (*left)(struct sfr__log_entry *entry);
	/* Since when what is to be ready waits for its file system without an answer (sfr__now_ns), 0
	 * where it does not. Any thread, with the log's lock, so it takes none. NULL: never. */
	uint64_t (*asked_since)(const struct sfr__log_entry *entry);
};

enum sfr__log_state {
	SFR__LOG_WAITING, /* not ready, or somebody else's work and not its turn */
	SFR__LOG_READY,   /* runs as soon as it is the head; somebody may take its turn */
	SFR__LOG_RUNNING, /* somebody is at it */
	SFR__LOG_WELL,    /* ended, and it did what it was to do */
	SFR__LOG_BADLY,   /* ended, and its name is as it was */
};

/* A place in the process's log, part of what it stands for. */
struct sfr__log_entry {
	const struct sfr__log_ops *ops; /* constant, as the next three */
	char *key;
	uint64_t number; /* what sfr__log_take_turn calls it by */
	uint64_t fs;     /* st_dev of the directory; 0 = unknown: it is never set aside */
	/* guarded by the log's mutex */
	struct sfr__log_entry *next;
	uint64_t seq;
	enum sfr__log_state state;
	struct sfr_log_load *loads; /* opened when this entry has ended */
	/* Since when a thread of the log is at it and has heard nothing of the file system, 0 = none
	 * is. Only that thread writes it: without the lock when something has been answered. */
	_Atomic uint64_t asked_ns;
	bool told; /* that its file system was set aside */
};

/* Keeps a place: the log's thread is started if it does not run, and runs until the place is taken
 * or given up. So what was promised then cannot fail any more. 0 or -errno. */
int sfr__log_reserve(void);
void sfr__log_unreserve(void);
/* Takes a reserved place, at the end, for an entry whose ops, key and state are set; it stays the
 * caller's until it has left. Its number. */
uint64_t sfr__log_append(struct sfr__log_entry *entry);
/* WAITING -> READY. */
void sfr__log_ready(struct sfr__log_entry *entry);
/* It has ended; the first end counts. */
void sfr__log_ended(struct sfr__log_entry *entry, bool well);
/* The number of the last entry that a close waits for, 0 if there was none. */
uint64_t sfr__log_close_seq(void);
/* Waits until the head is an entry that the log does not run itself and nobody has taken; takes it,
 * and says its number: the entry may leave the log, and go, as soon as the lock is given up.
 * SFR_EAGAIN, and SFR_ECLOSED when the log is being stopped. *after_good: the last save before it
 * did well. */
int sfr__log_take_turn(uint64_t slice_ns, uint64_t *number, bool *after_good);
/* A copy of a key, for an entry. NULL without memory. */
char *sfr__log_key(const char *key);

#endif
