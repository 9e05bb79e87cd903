/* The order of renames, removes and loads. See log.c. */
#ifndef SFR_LOG_H
#define SFR_LOG_H

#include "base/base.h"

/* A save's, remove's or other work's place in the process's log; guarded by the log's mutex. */
enum sfr__log_kind { SFR__LOG_SAVE, SFR__LOG_REMOVE, SFR__LOG_WORK };
struct sfr__log_entry {
	struct sfr__log_entry *next;
	enum sfr__log_kind kind;
	uint64_t seq;
	char *key;
	struct sfr_ticket *ticket;  /* SAVE */
	struct sfr_log_work *work;  /* WORK */
	struct sfr_log_load *loads; /* opened when this entry has ended */
	bool ready;                 /* SAVE: may be committed; WORK: it is its turn */
	bool taken;                 /* WORK: somebody does it */
	bool ended, ok;
};

/* Starts the log's thread if it does not run. 0 or -errno. */
int sfr__log_start(void);
/* Appends a save; entry->key and ->ticket are set. Takes over one reference of the ticket. */
void sfr__log_append(struct sfr__log_entry *entry);
void sfr__log_ready(struct sfr__log_entry *entry);
void sfr__log_ended(struct sfr__log_entry *entry, bool ok);
uint64_t sfr__log_last_remove(void);
/* As sfr__log_ended, but the first end counts: work may be ended more than once. */
void sfr__log_work_ended(struct sfr__log_entry *entry, bool ok);
/* Waits until a WORK entry is at the head and nobody has taken it; takes it, and says its number. SFR_EAGAIN, and
 * SFR_ECLOSED when the log is being stopped. *after_good: the last save before it did well. */
int sfr__log_take_turn(uint64_t slice_ns, uint64_t *number, bool *after_good);

/* ---- work.c ---- */
/* Whether the work makes its name (a save, a link), takes it away (a remove), and is a save. */
bool sfr__work_creates(const struct sfr_log_work *work);
bool sfr__work_is_save(const struct sfr_log_work *work);
/* Its entry has left the log: drops the log's reference. */
void sfr__work_left_log(struct sfr_log_work *work);

#endif
