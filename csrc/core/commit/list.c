/* The log's list: which entries are pending, in the order of submission, and whether a name will
 * exist when they have ended. */
#include <errno.h>
#include <string.h>

#include "commit/log_int.h"

#define PATIENCE_NS (UINT64_C(20) * 1000 * 1000 * 1000) /* 20 s */

struct sfr__log sfr__log = { .mu = SFR__MUTEX(SFR__LOCK_LOG), .patience_ns = PATIENCE_NS };

int sfr__log_init_locked(void)
{
	int rc;

	if (sfr__log.cv_ready)
		return 0;
	rc = sfr__cond_init(&sfr__log.cv_work);
	if (rc == 0)
		rc = sfr__cond_init(&sfr__log.cv_done);
	sfr__log.cv_ready = rc == 0;
	return rc;
}

bool sfr__log_has_ended(const struct sfr__log_entry *e)
{
	return e->state == SFR__LOG_SUCCEEDED || e->state == SFR__LOG_FAILED;
}

bool sfr__log_concerns(const struct sfr__log_entry *e, const char *key)
{
	const size_t len = strlen(e->key), key_len = strlen(key);
	const bool key_is_directory = key_len > 0 && key[key_len - 1] == '/';
	/* e->key may be the directory itself, without the slash at the end of `key` */
	const size_t directory_len = len < key_len ? key_len - 1 : key_len;
	const bool is_remove = !e->ops->creates;
	const bool covers_contents = e->ops->makes_directory || is_remove;

	if (strcmp(e->key, key) == 0)
		return true;
	if (key_is_directory && strncmp(e->key, key, directory_len) == 0)
		return true; /* the entry's name is the directory or in it */
	/* whether `key` is in the directory that the entry makes or removes */
	return covers_contents && strncmp(e->key, key, len) == 0 && key[len] == '/';
}

struct sfr__log_entry *sfr__log_last_concerning_locked(const char *key,
						       const struct sfr__log_entry *end)
{
	struct sfr__log_entry *last = NULL;

	for (struct sfr__log_entry *e = sfr__log.entries.head; e != end; e = e->next)
		if (sfr__log_concerns(e, key))
			last = e;
	return last;
}

uint64_t sfr__log_seq_awaited_by_close(void)
{
	return sfr__under(&sfr__log.mu, sfr__log.close_seq);
}

int sfr_log_will_exist(const char *key)
{
	struct sfr__log_entry *e;
	int answer = -1; /* no entry decides; sfr/log.h explains all answers */

	sfr__lock(&sfr__log.mu);
	e = sfr__log_last_concerning_locked(key, NULL);
	/* a failed save leaves its name unchanged, so the entry before it decides */
	while (e && e->ops->creates && e->state == SFR__LOG_FAILED)
		e = sfr__log_last_concerning_locked(key, e);
	/* 0: it is removed; 1: it is made; 2: the save of a directory above it decides */
	if (e && !e->ops->creates)
		answer = 0;
	else if (e)
		answer = strcmp(e->key, key) == 0 ? 1 : 2;
	sfr__unlock(&sfr__log.mu);
	return answer;
}

int sfr_log_drain(uint64_t *seq, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc;

	sfr__lock(&sfr__log.mu);
	rc = sfr__log_init_locked();
	if (*seq == 0) /* the first call: wait for all entries of now */
		*seq = sfr__log.last_seq;
	while (sfr__log.done_seq < *seq && rc == 0)
		rc = sfr__cond_wait(&sfr__log.cv_done, &sfr__log.mu, deadline);
	if (sfr__log.done_seq >= *seq)
		rc = 0; /* even if the last entry has ended just at the deadline */
	sfr__unlock(&sfr__log.mu);
	return rc;
}

uint64_t sfr_log_pending(void)
{
	return sfr__under(&sfr__log.mu, sfr__log.nr_pending);
}

void sfr_log_set_patience(uint64_t patience_ns)
{
	sfr__lock(&sfr__log.mu);
	sfr__log.patience_ns = patience_ns ? patience_ns : PATIENCE_NS;
	sfr__unlock(&sfr__log.mu);
}

/* Runs in a forked child. */
static void forget_parents_log(void)
{
	/* entries and threads are the parent's; a thread may have held the lock */
	memset(&sfr__log, 0, sizeof(sfr__log));
	sfr__log.patience_ns = PATIENCE_NS;
	sfr__mutex_init(&sfr__log.mu, SFR__LOCK_LOG);
}
SFR__AT_FORK(forget_parents_log)
