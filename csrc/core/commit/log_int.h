/* The log's list, its loads, and who may go past whom: what the files of this folder share.
 *
 * All of it is under one mutex, which is given up around every call that may ask a file system. */
#ifndef SFR_LOG_INT_H
#define SFR_LOG_INT_H

#include "base/queue.h"
#include "commit/log.h"

struct sfr__log {
	struct sfr__mutex mu; /* guards everything here and every log entry's fields */
	pthread_cond_t cv_work, cv_done;
	bool cv_ready;
	SFR__QUEUE(struct sfr__log_entry) entries;
	uint64_t last_seq, close_seq;
	uint64_t done_seq; /* every entry up to here has ended and left the list */
	uint64_t nr_pending;
	uint64_t patience_ns; /* how long a file system may take before it is set aside */
	/* log.c: its threads */
	unsigned nr_threads, nr_idle; /* those that run, and of them those that wait for work */
	bool stopping, has_gone;
	pthread_t gone;       /* the last thread that has ended, not joined yet */
	uint64_t nr_reserved; /* places that entries will take, or somebody gives up */
	uint64_t nr_stops;
	bool last_save_bad; /* the last save that left the list did not become durable */
};
extern struct sfr__log sfr__log;

/* ---- list.c ---- */

/* The conditions, at the first use. 0 or -errno. */
int sfr__log_init_locked(void);
bool sfr__log_has_ended(const struct sfr__log_entry *e);
/* Does this entry decide what `key` will be? A remove also takes what lies below it. */
bool sfr__log_touches(const struct sfr__log_entry *e, const char *key);
/* The last entry that does, before `end` (NULL: of all). */
struct sfr__log_entry *sfr__log_last_touching_locked(const char *key,
						     const struct sfr__log_entry *end);

/* ---- loads.c ---- */

/* Opens the loads of an entry that has ended, which were taken from it. Without the lock. */
void sfr__log_open_loads(struct sfr_log_load *loads);

/* ---- aside.c ---- */

/* Is all that this entry was there for done? */
bool sfr__log_is_over_locked(const struct sfr__log_entry *e);
/* May this entry be worked on before what stands in front of it has ended? */
bool sfr__log_may_pass_locked(const struct sfr__log_entry *e, uint64_t now);
/* Would it, if what is being worked on did not come to an end? */
bool sfr__log_might_pass_locked(const struct sfr__log_entry *e);
/* Says once of each file system in front of `e` that it is set aside. */
void sfr__log_tell_aside_locked(const struct sfr__log_entry *e, uint64_t now);

#endif
