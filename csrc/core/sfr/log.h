/* The process's ordered log. See commit/log.c. */
#ifndef SFR_LOG_PUBLIC_H
#define SFR_LOG_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

/* A key is the real path of the parent, a slash, and the last component.
 * A remove runs when every save submitted before it has ended, and only if the last of them
 * became durable (without SFR_SAVE_DURABLE: was renamed); with no save before it, it runs.
 * Directories are removed with what is in them. `seq_out` may be NULL. */
int sfr_log_remove(const char *key, uint64_t *seq_out);
/* What the name will be when the log has run out: 1 there (a save of it is pending), 0 gone
 * (a remove of it or of a parent is pending), -1 no entry says: ask the file system. */
int sfr_log_exists(const char *key);
/* Waits until no save or remove of `key` submitted up to now is pending; then opens it for
 * reading, in the log's order: *fd_out >= 0, or returns -errno of open. */
struct sfr_log_load;
int sfr_log_load_new(const char *key, struct sfr_log_load **out);
int sfr_log_load_wait(struct sfr_log_load *load, uint64_t slice_ns, int *fd_out);
void sfr_log_load_free(struct sfr_log_load *load);
/* Waits until everything submitted up to the first call with *seq == 0 has ended; *seq keeps
 * the place between slices. */
int sfr_log_drain(uint64_t *seq, uint64_t slice_ns);
/* Saves and removes not yet ended. */
uint64_t sfr_log_pending(void);
/* Is there something pending whose file system has not answered for 20 s? 1, with a sentence that
 * names it in `text`, or 0. What is saved to others and ready does not wait for it. */
int sfr_log_unanswered(char *text, size_t len);
/* For tests: how long a file system may take before it is set aside; 0 = as ever. */
void sfr_log_tune(uint64_t patience_ns);
/* Ends the log's threads once the log has run out and no save is between admit and launch; the next
 * save or remove starts one again. */
int sfr_log_stop(void);

/* ---- work done elsewhere, in the log's order (commit/work.c) ---- */

/* An entry whose work somebody outside the core does: a link, a save or a remove by other code.
 * It blocks the log from the moment it is at the head until sfr_log_work_end, so everything
 * submitted before it has ended by then, and nothing submitted after it has begun to take effect.
 * Loads and sfr_log_exists see it as they see saves and removes. */
enum sfr_work_kind { SFR_WORK_SAVE, SFR_WORK_REMOVE, SFR_WORK_LINK };
struct sfr_log_work;
/* Makes an entry with one reference, the caller's; it is in no log yet. -ENOMEM, -EINVAL. */
int sfr_log_work_new(const char *key, enum sfr_work_kind kind, struct sfr_log_work **out);
/* Submits it: once. Never waits. */
int sfr_log_work_append(struct sfr_log_work *work);
uint64_t sfr_log_work_number(const struct sfr_log_work *work); /* from 1, of the process */
/* Waits until an entry of this kind is at the head and says its number, each once. *after_good is 0
 * when the last save before it failed. SFR_EAGAIN; SFR_ECLOSED when the log is being stopped. */
int sfr_log_work_next(uint64_t slice_ns, uint64_t *number, int *after_good);
/* The work has ended, well (`ok`) or not; a save that did not holds back removes as any other.
 * Later calls change nothing. */
void sfr_log_work_end(struct sfr_log_work *work, int ok);
/* Drops the caller's reference; what was appended and not ended ends as failed. NULL is fine. */
void sfr_log_work_put(struct sfr_log_work *work);

#endif
