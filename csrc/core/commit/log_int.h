/* The state of the log, shared by the files of this folder. Its mutex is released around every call
 * that may wait for a file system. */
#ifndef SFR_LOG_INT_H
#define SFR_LOG_INT_H

#include "base/queue.h"
#include "commit/log.h"

struct sfr__log {
	struct sfr__mutex mu;   /* guards everything here and the fields of every entry */
	pthread_cond_t cv_work; /* wakes the log's threads: a step may be possible */
	pthread_cond_t cv_done; /* wakes callers: something has ended, or work can be taken */
	bool cv_ready;          /* cv_work and cv_done are initialised */
	SFR__QUEUE(struct sfr__log_entry) entries;
	uint64_t last_seq;    /* seq of the last appended entry */
	uint64_t close_seq;   /* seq of the last entry that closing an engine waits for; 0: none */
	uint64_t done_seq;    /* every entry up to this seq has left the list */
	uint64_t nr_pending;  /* entries in the list */
	uint64_t patience_ns; /* how long a file system may take before others overtake it */
	/* log.c: its threads */
	unsigned nr_threads;    /* running threads */
	unsigned nr_idle;       /* how many of them wait for work */
	bool stopping;          /* sfr_log_stop was called: the threads end once the log is empty */
	bool has_ended_thread;  /* `ended_thread` is set */
	pthread_t ended_thread; /* the thread that ended last; it is not joined yet */
	uint64_t nr_reserved;   /* reservations (sfr__log_reserve) not used or given up yet */
	uint64_t nr_stops; /* calls of sfr_log_stop, which ends sfr__log_take_external_work too */
	bool last_save_failed; /* the save that left the list last has failed */
};
extern struct sfr__log sfr__log;

/* ---- list.c ---- */

/* Initialises the condition variables at first use. Returns 0 or -errno. */
int sfr__log_init_locked(void);
bool sfr__log_has_ended(const struct sfr__log_entry *e);
/* Returns whether this entry concerns `key`: the entry may make or remove that name. A remove, and
 * the save of a directory, concern every name below their own. A `key` that ends in a slash is a
 * directory: every entry whose name is in the directory concerns it. */
bool sfr__log_concerns(const struct sfr__log_entry *e, const char *key);
/* Returns the last entry before `end` that concerns `key`, or NULL. If `end` is NULL, considers all
 * entries. */
struct sfr__log_entry *sfr__log_last_concerning_locked(const char *key,
						       const struct sfr__log_entry *end);

/* ---- loads.c ---- */

/* Opens the files of a list of loads, whose entry has ended. Called without the lock. */
void sfr__log_open_loads(struct sfr_log_load *loads);

/* ---- aside.c ---- */

/* Returns whether this entry may leave the list: it has ended, its loads are open and no thread
 * works on it. */
bool sfr__log_can_leave_list_locked(const struct sfr__log_entry *e);
/* Returns whether this entry may run before the entries in front of it have ended. `now` is the
 * time of sfr__now_ns. */
bool sfr__log_may_overtake_locked(const struct sfr__log_entry *e, uint64_t now);
/* Returns whether this entry may have to overtake later: it is a ready save, and a thread works on
 * an entry in front of it on another file system. */
bool sfr__log_may_overtake_later_locked(const struct sfr__log_entry *e);
/* Posts one notice for each file system on which an entry in front of `e` hangs. Posts no second
 * notice while that entry is in the list. */
void sfr__log_report_hangs_locked(const struct sfr__log_entry *e, uint64_t now);

#endif
