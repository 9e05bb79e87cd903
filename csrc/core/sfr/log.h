/* The process's ordered log of renames, removes and loads. commit/log.c implements it. */
#ifndef SFR_LOG_PUBLIC_H
#define SFR_LOG_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

/* Appends a remove of `key`: the real path of the parent directory, a slash, and the last
 * component. A directory is removed with its contents. The remove runs when every save submitted
 * before it has ended. The remove is dropped if the last of these saves has failed: a save with
 * SFR_SAVE_DURABLE must be durable, any other must be renamed. Returns 0 or -errno. *seq_out gets
 * the entry's sequence number, unless it is NULL. */
int sfr_log_append_remove(const char *key, uint64_t *seq_out);
/* Says whether `key` will exist once the log is empty:
 *
 *   1   yes: a save of the name is pending
 *   0   no: a remove of the name, or of a directory above it, is pending
 *   2   a save of a directory above the name is pending: its contents decide
 *  -1   no entry concerns the name: ask the file system */
int sfr_log_will_exist(const char *key);
/* A load of `key`. Its file is opened after every earlier save and remove of `key` has ended, and
 * before any later save or remove takes effect. A key that ends in a slash names a directory: the
 * load then also waits for the saves and removes of everything in the directory. */
struct sfr_log_load;
/* Submits a load. Returns 0 or -errno. */
int sfr_log_load_new(const char *key, struct sfr_log_load **out);
/* Waits until the file is open for reading, and gives its descriptor to the caller. Returns 0; or,
 * with *fd_out -1, SFR_EAGAIN, SFR_EFORK or -errno of open. */
int sfr_log_load_wait(struct sfr_log_load *load, uint64_t slice_ns, int *fd_out);
/* Frees a load at any time; accepts NULL. Closes the file if sfr_log_load_wait has not handed its
 * descriptor over. */
void sfr_log_load_free(struct sfr_log_load *load);

/* Waits until everything submitted before the first call has ended. *seq must be 0 for the first
 * call, which sets it. Calls with the same *seq resume the wait. Returns 0 or SFR_EAGAIN. */
int sfr_log_drain(uint64_t *seq, uint64_t slice_ns);
/* Returns how many saves and removes have not ended. */
uint64_t sfr_log_pending(void);
/* Returns 1, with a sentence in `text`, if something pending is on a file system that has not
 * answered for 20 s; else 0. Saves to other file systems do not wait for it. */
int sfr_log_describe_hang(char *text, size_t len);
/* For tests: sets how long the log waits for a file system that does not answer, before saves to
 * other file systems go ahead. 0 restores the default. */
void sfr_log_set_patience(uint64_t patience_ns);
/* Waits until the log is empty and no save is between admit and launch, then ends the log's
 * threads. The next save or remove starts them again. Returns 0. */
int sfr_log_stop(void);

/* ---- external work in the log's order (commit/work.c) ---- */

/* An entry whose work is done outside the core: a link, or a save or remove by other code. When the
 * entry is at the head of the log, everything submitted before it has ended. It stays there until
 * sfr_external_work_mark_ended, so nothing submitted after it takes effect. Loads and
 * sfr_log_will_exist treat the entry like a save or a remove. */
enum sfr_external_work_kind {
	SFR_WORK_SAVE,
	SFR_WORK_REMOVE,
	SFR_WORK_LINK,
	SFR_WORK_DIRECTORY, /* a save that makes its name and everything below it */
};
struct sfr_external_work;
/* Makes an entry, owned by the caller and not in the log yet. Returns 0, -ENOMEM or -EINVAL. */
int sfr_external_work_new(const char *key, enum sfr_external_work_kind kind,
			  struct sfr_external_work **out);
/* Appends the entry to the log. Called once; never waits. Returns 0 or -errno. */
int sfr_external_work_append(struct sfr_external_work *work);
uint64_t sfr_external_work_number(const struct sfr_external_work
					  *work); /* from 1, unique in the process */
/* Waits until external work is at the head of the log, and sets *number to the entry's number. Each
 * entry is given to one caller. *after_good is 0 if the last save before the entry failed. Returns
 * 0, SFR_EAGAIN, or SFR_ECLOSED when the log is being stopped. */
int sfr_external_work_take_next(uint64_t slice_ns, uint64_t *number, int *after_good);
/* Ends the work, as a success if `ok`. After a failed save later removes do not run. Idempotent. */
void sfr_external_work_mark_ended(struct sfr_external_work *work, int ok);
/* Drops the caller's reference. Accepts NULL. An appended entry that has not ended then fails. */
void sfr_external_work_put(struct sfr_external_work *work);

#endif
