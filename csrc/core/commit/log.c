/* The process's ordered log: renames and removes take effect in the order of submission.
 *
 * One list, oldest first, and one thread (`sfr-log`) that works on its head only:
 *
 *   WAITING ──▶ READY ──at the head──▶ RUNNING ──▶ WELL, BADLY ──its loads are open──▶ left
 *      └────────────── a save that failed before ──────────▲
 *
 *   a save     ready once it is synced; runs: rename, sync the directory (save/commit.c)
 *   a remove   ready at once; runs: removes, or does not where the last save before it did not
 *              become durable (removes.c)
 *   work       ready once it is the head; whoever takes its turn does it and ends it (work.c)
 *
 * A save's data is written and synced by the engine's writers long before; only the commit
 * waits here. So a rotation (save the new, remove the old) can never leave fewer durable
 * checkpoints than before: the remove stands behind the save in the same list.
 *
 * A load that was asked for while entries of its name are pending hangs on the last of them
 * and is opened by this thread the moment that entry has ended, before anything later can
 * rename or remove the name. It holds nothing up: what it has from then on is a descriptor.
 *
 * One thread makes all commits, so writers never wait for their turn and no number of them can
 * deadlock; a rename and a directory's sync are short beside the data. Loads are opened here and
 * not by who asks, since one that only waited could lose the race with a remove submitted after
 * it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "base/queue.h"
#include "commit/log.h"

struct sfr_log_load {
	struct sfr_log_load *next; /* on the same entry */
	uint64_t fork_generation;
	char *key;
	bool attached; /* hangs on an entry; the log's thread opens it */
	bool opened, abandoned;
	int fd; /* or -errno */
};

static struct {
	struct sfr__mutex mu; /* guards everything here and every log entry's fields */
	pthread_cond_t cv_work, cv_done;
	bool cv_ready, running, stopping;
	pthread_t thread;
	SFR__QUEUE(struct sfr__log_entry) entries;
	uint64_t last_seq, close_seq;
	uint64_t done_seq; /* every entry up to here has ended and left the list */
	uint64_t nr_pending;
	uint64_t nr_reserved; /* places that entries will take, or somebody gives up */
	uint64_t nr_stops;
	bool last_save_bad; /* the last save that left the list did not become durable */
} slog = { .mu = SFR__MUTEX(SFR__LOCK_LOG) };

static int init_locked(void)
{
	int rc;

	if (slog.cv_ready)
		return 0;
	rc = sfr__cond_init(&slog.cv_work);
	if (rc == 0)
		rc = sfr__cond_init(&slog.cv_done);
	slog.cv_ready = rc == 0;
	return rc;
}

static bool has_ended(const struct sfr__log_entry *e)
{
	return e->state == SFR__LOG_WELL || e->state == SFR__LOG_BADLY;
}

/* Does this entry decide what `key` will be? A remove also takes what lies below it. */
static bool touches(const struct sfr__log_entry *e, const char *key)
{
	size_t len = strlen(e->key);

	if (strcmp(e->key, key) == 0)
		return true;
	return !e->ops->creates && strncmp(e->key, key, len) == 0 && key[len] == '/';
}

/* The last entry that does, before `end` (NULL: of all). */
static struct sfr__log_entry *last_touching_locked(const char *key,
						   const struct sfr__log_entry *end)
{
	struct sfr__log_entry *found = NULL;

	for (struct sfr__log_entry *e = slog.entries.head; e != end; e = e->next)
		if (touches(e, key))
			found = e;
	return found;
}

/* ---- the log's thread ---- */

static int open_key(const char *key)
{
	int fd = -1;

	for (int tries = 0; tries < SFR__EINTR_TRIES; tries++) {
		/* A FIFO must not hold the log. */
		fd = sfr_sys.open(AT_FDCWD, key, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
		if (fd >= 0 || errno != EINTR)
			break;
	}
	return fd < 0 ? -errno : fd;
}

/* Opens the loads that hang on an entry that has just ended. */
static void open_loads(struct sfr_log_load *load)
{
	while (load) {
		struct sfr_log_load *next = load->next;
		int fd = open_key(load->key);

		sfr__lock(&slog.mu);
		load->fd = fd;
		load->opened = true;
		if (load->abandoned) {
			sfr__unlock(&slog.mu);
			sfr_log_load_free(load);
		} else {
			pthread_cond_broadcast(&slog.cv_done);
			sfr__unlock(&slog.mu);
		}
		load = next;
	}
}

/* Lets the head do what there is to do. It may be gone afterwards, as far as it has ended. */
static void run_locked(struct sfr__log_entry *e)
{
	bool after_good = !slog.last_save_bad;

	e->state = SFR__LOG_RUNNING;
	sfr__unlock(&slog.mu);
	e->ops->run(e, after_good);
	sfr__lock(&slog.mu);
}

/* The head has ended: it leaves the list when its loads are open, since until then nothing behind
 * it may run. */
static void leave_locked(struct sfr__log_entry *e)
{
	struct sfr_log_load *loads = e->loads;

	e->loads = NULL;
	if (loads) {
		sfr__unlock(&slog.mu);
		open_loads(loads);
		sfr__lock(&slog.mu);
		return; /* more may have come meanwhile */
	}
	if (e->ops->is_save)
		slog.last_save_bad = e->state == SFR__LOG_BADLY;
	(void)sfr__queue_pop(&slog.entries); /* e */
	slog.done_seq = e->seq;
	slog.nr_pending--;
	pthread_cond_broadcast(&slog.cv_done);
	sfr__unlock(&slog.mu);
	e->ops->left(e);
	sfr__lock(&slog.mu);
}

static void *log_main(void *unused)
{
	(void)unused;
	sfr__lock(&slog.mu);
	for (;;) {
		struct sfr__log_entry *e = slog.entries.head;

		if (!e && slog.stopping && slog.nr_reserved == 0)
			break;
		if (e && has_ended(e)) {
			leave_locked(e);
		} else if (e && e->state == SFR__LOG_READY && e->ops->run) {
			run_locked(e);
		} else {
			if (e && e->state == SFR__LOG_WAITING && !e->ops->run) {
				e->state = SFR__LOG_READY;
				pthread_cond_broadcast(&slog.cv_done);
			}
			(void)sfr__cond_wait(&slog.cv_work, &slog.mu, SFR_FOREVER);
		}
	}
	slog.running = slog.stopping = false; /* whoever reserves from now on starts another one */
	sfr__unlock(&slog.mu);
	return NULL;
}

int sfr__log_reserve(void)
{
	int rc;

	sfr__lock(&slog.mu);
	rc = init_locked();
	if (rc == 0 && !slog.running) {
		rc = sfr__thread_start(&slog.thread, "sfr-log", log_main, NULL);
		slog.running = rc == 0;
	}
	slog.nr_reserved += rc == 0;
	sfr__unlock(&slog.mu);
	return rc;
}

void sfr__log_unreserve(void)
{
	sfr__lock(&slog.mu);
	slog.nr_reserved--;
	pthread_cond_signal(&slog.cv_work);
	sfr__unlock(&slog.mu);
}

int sfr_log_stop(void)
{
	pthread_t thread;

	sfr__lock(&slog.mu);
	if (!slog.running || slog.stopping) {
		sfr__unlock(&slog.mu);
		return 0;
	}
	slog.stopping = true;
	slog.nr_stops++;
	thread = slog.thread;
	pthread_cond_signal(&slog.cv_work);
	pthread_cond_broadcast(&slog.cv_done); /* who waits for work is to end as well */
	sfr__unlock(&slog.mu);
	(void)sfr_sys.thread_join(thread, NULL); /* cannot fail: it is ours and joinable */
	return 0;
}

/* ---- entries; for saves with the engine's mutex held ---- */

char *sfr__log_key(const char *key)
{
	size_t len = strlen(key) + 1;
	char *copy = sfr_sys.malloc(len);

	if (copy)
		memcpy(copy, key, len);
	return copy;
}

uint64_t sfr__log_append(struct sfr__log_entry *entry)
{
	uint64_t seq;

	sfr__lock(&slog.mu);
	seq = entry->seq = ++slog.last_seq;
	if (entry->ops->close_waits)
		slog.close_seq = seq;
	sfr__queue_push(&slog.entries, entry);
	slog.nr_pending++;
	slog.nr_reserved--;
	pthread_cond_signal(&slog.cv_work);
	sfr__unlock(&slog.mu);
	return seq;
}

void sfr__log_ready(struct sfr__log_entry *entry)
{
	sfr__lock(&slog.mu);
	if (entry->state == SFR__LOG_WAITING)
		entry->state = SFR__LOG_READY;
	pthread_cond_signal(&slog.cv_work);
	sfr__unlock(&slog.mu);
}

void sfr__log_ended(struct sfr__log_entry *entry, bool well)
{
	sfr__lock(&slog.mu);
	if (!has_ended(entry))
		entry->state = well ? SFR__LOG_WELL : SFR__LOG_BADLY;
	pthread_cond_signal(&slog.cv_work);
	sfr__unlock(&slog.mu);
}

int sfr__log_take_turn(uint64_t slice_ns, uint64_t *number, bool *after_good)
{
	uint64_t deadline = sfr__deadline(slice_ns), nr_stops;
	int rc;

	*number = 0;
	sfr__lock(&slog.mu);
	rc = init_locked();
	nr_stops = slog.nr_stops;
	while (rc == 0) {
		struct sfr__log_entry *e = slog.entries.head;

		if (e && !e->ops->run && e->state == SFR__LOG_READY) {
			e->state = SFR__LOG_RUNNING;
			*number = e->number;
			*after_good = !slog.last_save_bad;
			break;
		}
		rc = slog.nr_stops != nr_stops && !e ?
			     SFR_ECLOSED :
			     sfr__cond_wait(&slog.cv_done, &slog.mu, deadline);
	}
	sfr__unlock(&slog.mu);
	return rc;
}

uint64_t sfr__log_close_seq(void)
{
	uint64_t seq;

	sfr__lock(&slog.mu);
	seq = slog.close_seq;
	sfr__unlock(&slog.mu);
	return seq;
}

/* ---- questions, loads ---- */

int sfr_log_exists(const char *key)
{
	struct sfr__log_entry *e;
	int answer = -1;

	sfr__lock(&slog.mu);
	e = last_touching_locked(key, NULL);
	/* A save that has failed by now leaves the name as it was; whoever asks gets that from
	 * the file system, which an earlier entry may still change: then the earlier one says. */
	while (e && e->ops->creates && e->state == SFR__LOG_BADLY)
		e = last_touching_locked(key, e);
	if (e)
		answer = e->ops->creates;
	sfr__unlock(&slog.mu);
	return answer;
}

int sfr_log_load_new(const char *key, struct sfr_log_load **out)
{
	struct sfr_log_load *load = sfr_sys.calloc(1, sizeof(*load));
	struct sfr__log_entry *e;
	int rc;

	*out = NULL;
	if (!load)
		return -ENOMEM;
	load->fd = -1;
	load->fork_generation = sfr_fork_generation();
	load->key = sfr__log_key(key);
	if (!load->key) {
		sfr_sys.free(load);
		return -ENOMEM;
	}
	sfr__lock(&slog.mu);
	rc = init_locked();
	e = rc == 0 ? last_touching_locked(key, NULL) : NULL;
	if (e) {
		load->attached = true;
		load->next = e->loads;
		e->loads = load;
	}
	sfr__unlock(&slog.mu);
	if (rc < 0) {
		sfr_sys.free(load->key);
		sfr_sys.free(load);
		return rc;
	}
	*out = load;
	return 0;
}

int sfr_log_load_wait(struct sfr_log_load *load, uint64_t slice_ns, int *fd_out)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	*fd_out = -1;
	if (load->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (!load->attached) {
		int fd = open_key(load->key);

		if (fd < 0)
			return fd;
		*fd_out = fd;
		return 0;
	}
	sfr__lock(&slog.mu);
	while (!load->opened && rc == 0)
		rc = sfr__cond_wait(&slog.cv_done, &slog.mu, deadline);
	if (load->opened) {
		rc = load->fd < 0 ? load->fd : 0;
		*fd_out = load->fd < 0 ? -1 : load->fd;
		load->fd = -1; /* handed over */
	}
	sfr__unlock(&slog.mu);
	return rc;
}

void sfr_log_load_free(struct sfr_log_load *load)
{
	if (!load || load->fork_generation != sfr_fork_generation())
		return;
	sfr__lock(&slog.mu);
	if (load->attached && !load->opened) {
		load->abandoned = true; /* the log's thread still has it, and frees it */
		load = NULL;
	}
	sfr__unlock(&slog.mu);
	if (!load)
		return;
	if (load->fd >= 0)
		(void)sfr_sys.close(load->fd); /* only read from: nothing can be lost */
	sfr_sys.free(load->key);
	sfr_sys.free(load);
}

int sfr_log_drain(uint64_t *seq, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc;

	sfr__lock(&slog.mu);
	rc = init_locked();
	if (*seq == 0)
		*seq = slog.last_seq;
	while (slog.done_seq < *seq && rc == 0)
		rc = sfr__cond_wait(&slog.cv_done, &slog.mu, deadline);
	if (slog.done_seq >= *seq)
		rc = 0;
	sfr__unlock(&slog.mu);
	return rc;
}

uint64_t sfr_log_pending(void)
{
	uint64_t nr;

	sfr__lock(&slog.mu);
	nr = slog.nr_pending;
	sfr__unlock(&slog.mu);
	return nr;
}

static void forget(void)
{
	/* Entries, thread and waiters are the parent's; the lock may be one of theirs. */
	memset(&slog, 0, sizeof(slog));
	sfr__mutex_init(&slog.mu, SFR__LOCK_LOG);
}
SFR__AT_FORK(forget)
