/* The log's list, its loads and its rules of overtaking, shared by the files of this folder.
 *
 * One mutex guards all of it. It is released around every call that may wait for a file system. */
#ifndef SFR_LOG_INT_H
#define SFR_LOG_INT_H

#include "base/queue.h"
#include "commit/log.h"

struct sfr__log {
	struct sfr__mutex mu; /* guards everything here and the fields of every entry */
	pthread_cond_t cv_work, cv_done;
	bool cv_ready;
	SFR__QUEUE(struct sfr__log_entry) entries;
	uint64_t last_seq, close_seq;
	uint64_t done_seq; /* every entry up to this number has ended and left the list */
	uint64_t nr_pending;
	uint64_t patience_ns; /* how long a file system may take before it is set aside */
	/* log.c: its threads */
	unsigned nr_threads, nr_idle; /* running threads, and those of them that wait for work */
	bool stopping, has_gone;
	pthread_t gone;       /* the last thread that ended, not joined yet */
	uint64_t nr_reserved; /* reserved entries, not yet appended or given up */
	uint64_t nr_stops;
	bool last_save_bad; /* the last save that left the list did not become durable */
};
extern struct sfr__log sfr__log;

/* ---- list.c ---- */

/* Initialises the conditions at first use. 0 or -errno. */
int sfr__log_init_locked(void);
bool sfr__log_has_ended(const struct sfr__log_entry *e);
/* Returns whether this entry decides if `key` will exist. A remove and the save of a directory also
 * concern what is below their name. A key that ends in a slash is a directory: entries of its own
 * name and of every name in it concern it. */
bool sfr__log_touches(const struct sfr__log_entry *e, const char *key);
/* Returns the last such entry, before `end` (NULL: of all). */
struct sfr__log_entry *sfr__log_last_touching_locked(const char *key,
						     const struct sfr__log_entry *end);

/* ---- loads.c ---- */

/* Opens the loads taken from an entry that has ended. Called without the lock. */
void sfr__log_open_loads(struct sfr_log_load *loads);

/* ---- aside.c ---- */

/* Returns whether everything this entry was for is done. */
bool sfr__log_is_over_locked(const struct sfr__log_entry *e);
/* Returns whether this entry may run before those in front of it have ended. */
bool sfr__log_may_pass_locked(const struct sfr__log_entry *e, uint64_t now);
/* Returns whether it could overtake if the entries being worked on do not end. */
bool sfr__log_might_pass_locked(const struct sfr__log_entry *e);
/* Posts a notice, once for each file system in front of `e` that is set aside. */
void sfr__log_report_aside_locked(const struct sfr__log_entry *e, uint64_t now);

#endif
