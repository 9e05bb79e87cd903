/* The log's list, its loads and its rules of overtaking, shared by the files of this folder.
 *
 * One mutex guards all of it. It is released around every call that may wait for a file system. */
#ifndef SFR_LOG_INT_H
#define SFR_LOG_INT_H

#include "base/queue.h"
#include "commit/log.h"

struct sfr__log {
	struct sfr__mutex mu;   /* guards everything here and the fields of every entry */
	pthread_cond_t cv_work; /* wakes the log's threads: a step may be possible */
	pthread_cond_t cv_done; /* wakes callers: something has ended, or work can be taken */
	bool cv_ready;          /* both conditions are initialised */
	SFR__QUEUE(struct sfr__log_entry) entries;
	uint64_t last_seq;    /* of the last appended entry */
	uint64_t close_seq;   /* of the last entry that a close of an engine waits for */
	uint64_t done_seq;    /* every entry up to this number has ended and left the list */
	uint64_t nr_pending;  /* entries in the list */
	uint64_t patience_ns; /* how long a file system may take before it is set aside */
	/* log.c: its threads */
	unsigned nr_threads, nr_idle; /* running threads, and those of them that wait for work */
	bool stopping; /* sfr_log_stop was called: the threads end once the log is empty */
	bool has_gone; /* `gone` is set: the last thread that ended, not joined yet */
	pthread_t gone;
	uint64_t nr_reserved; /* reserved entries, not yet appended or given up */
	uint64_t nr_stops;    /* calls of sfr_log_stop; sfr__log_take_work notices a new one */
	bool last_save_bad;   /* the last save that left the list has failed */
};
extern struct sfr__log sfr__log;

/* ---- list.c ---- */

/* Initialises the conditions at first use. 0 or -errno. */
int sfr__log_init_locked(void);
bool sfr__log_has_ended(const struct sfr__log_entry *e);
/* Returns whether this entry concerns `key`, so that its end may decide whether the name exists. A
 * remove and the save of a directory also concern every name below their own. A `key` that ends in
 * a slash is a directory, which entries of every name in it concern too. */
bool sfr__log_concerns(const struct sfr__log_entry *e, const char *key);
/* Returns the last entry before `end` (NULL: of all) that concerns `key`, or NULL. */
struct sfr__log_entry *sfr__log_last_concerning_locked(const char *key,
						       const struct sfr__log_entry *end);

/* ---- loads.c ---- */

/* Opens a list of loads, taken from an entry that has ended. Called without the lock. */
void sfr__log_open_loads(struct sfr_log_load *loads);

/* ---- aside.c ---- */

/* Returns whether this entry is over: it has ended, its loads are open and no thread works on it.
 * Then it may leave the list. */
bool sfr__log_is_over_locked(const struct sfr__log_entry *e);
/* Returns whether this entry may overtake now: run before the entries in front of it have ended.
 * `now` is the time of sfr__now_ns. */
bool sfr__log_may_overtake_locked(const struct sfr__log_entry *e, uint64_t now);
/* Returns whether this entry may have to overtake later: it is ready, and a thread works on an
 * entry in front of it, on another file system, which might hang. */
bool sfr__log_may_overtake_later_locked(const struct sfr__log_entry *e);
/* Posts one notice for each file system on which entries in front of `e` hang. */
void sfr__log_report_aside_locked(const struct sfr__log_entry *e, uint64_t now);

#endif
