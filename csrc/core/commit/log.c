/* The process's ordered log: renames and removes take effect in the order of submission.
 *
 * One list, oldest first, and one thread (`sfr-log`) that works on its head only:
 *
 *   head is a save   not ready            wait
 *                    ready                rename, sync the directory, end it
 *                    ended (failed ...)   drop it, remember that it was no success
 *   head is a remove                      remove, or drop it when the last save before it
 *                                         did not become durable
 *   head is work     not ended            whoever does it may (work.c); wait
 *                    ended                drop it, remember how a save among them ended
 *
 * A save's data is written and synced by the engine's writers long before; only the commit
 * waits here. So a rotation (save the new, remove the old) can never leave fewer durable
 * checkpoints than before: the remove stands behind the save in the same list.
 *
 * A load that was asked for while entries of its name are pending hangs on the last of them
 * and is opened by this thread the moment that entry has ended, before anything later can
 * rename or remove the name. It holds nothing up: what it has from then on is a descriptor.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "save/save.h"
#include "trace/trace.h"

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
	struct sfr__log_entry *head, *tail;
	uint64_t last_seq, last_remove_seq;
	uint64_t done_seq; /* every entry up to here has ended and left the list */
	uint64_t nr_pending;
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

static bool creates(const struct sfr__log_entry *e)
{
	return e->kind == SFR__LOG_WORK ? sfr__work_creates(e->work) : e->kind == SFR__LOG_SAVE;
}

static bool is_save(const struct sfr__log_entry *e)
{
	return e->kind == SFR__LOG_WORK ? sfr__work_is_save(e->work) : e->kind == SFR__LOG_SAVE;
}

/* Does this entry decide what `key` will be? A remove also takes what lies below it. */
static bool touches(const struct sfr__log_entry *e, const char *key)
{
	size_t len = strlen(e->key);

	if (strcmp(e->key, key) == 0)
		return true;
	return !creates(e) && strncmp(e->key, key, len) == 0 && key[len] == '/';
}

static struct sfr__log_entry *last_touching_locked(const char *key)
{
	struct sfr__log_entry *found = NULL;

	for (struct sfr__log_entry *e = slog.head; e; e = e->next)
		if (touches(e, key))
			found = e;
	return found;
}

static void append_locked(struct sfr__log_entry *e)
{
	e->next = NULL;
	e->seq = ++slog.last_seq;
	if (slog.tail)
		slog.tail->next = e;
	else
		slog.head = e;
	slog.tail = e;
	slog.nr_pending++;
	pthread_cond_signal(&slog.cv_work);
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

static void run_remove(const struct sfr__log_entry *e, bool drop)
{
	struct sfr_err err = { .index = -1 };

	SFR__TRACE(SFR_TRACE_REMOVE, 0, 0);
	if (drop) {
		sfr__notice_text("%s was not removed: the save before it did not become durable",
				 e->key);
		return;
	}
	if (sfr__file_remove(e->key, &err) < 0)
		sfr__notice_text("%s could not be removed: %s", e->key,
				 err.code <= -1000 ? sfr_code_message(err.code) :
						     strerror(-err.code));
}

/* A span of its own: it has ended before anybody hears of the save's end. */
static void commit_file(struct sfr_ticket *t, struct sfr_err *err)
{
	SFR__TRACE(SFR_TRACE_COMMIT, t->number, 0);
	(void)sfr__file_commit(&t->file, err); /* err holds what it returns */
	sfr__file_fini(&t->file);
}

static void run_commit(struct sfr_ticket *t)
{
	struct sfr_err err = { .index = -1 };

	if (!sfr__ticket_begin_commit(t))
		return; /* cancelled in time: it ends as any failed save does */
	commit_file(t, &err);
	sfr__ticket_finish(t, &err);
}

static void *log_main(void *unused)
{
	(void)unused;
	sfr__lock(&slog.mu);
	for (;;) {
		struct sfr__log_entry *e = slog.head;
		struct sfr_log_load *loads;
		struct sfr_ticket *ticket;
		struct sfr_log_work *work;

		if (!e && slog.stopping)
			break;
		if (e && e->kind == SFR__LOG_WORK && !e->ended) {
			e->ready = !e->taken;
			pthread_cond_broadcast(&slog.cv_done);
			(void)sfr__cond_wait(&slog.cv_work, &slog.mu, SFR_FOREVER);
			continue;
		}
		if (!e || (e->kind == SFR__LOG_SAVE && !e->ready && !e->ended)) {
			(void)sfr__cond_wait(&slog.cv_work, &slog.mu, SFR_FOREVER);
			continue;
		}
		if (!e->ended) {
			bool drop = slog.last_save_bad;

			e->ready = false;
			sfr__unlock(&slog.mu);
			if (e->kind == SFR__LOG_SAVE)
				run_commit(e->ticket);
			else
				run_remove(e, drop);
			sfr__lock(&slog.mu);
			if (e->kind == SFR__LOG_REMOVE)
				e->ended = true;
			continue;
		}
		/* The head has ended: it leaves the list when its loads are open, since until
		 * then nothing behind it may run. */
		if (is_save(e))
			slog.last_save_bad = !e->ok;
		loads = e->loads;
		e->loads = NULL;
		if (loads) {
			sfr__unlock(&slog.mu);
			open_loads(loads);
			sfr__lock(&slog.mu);
			continue;
		}
		slog.head = e->next;
		if (!slog.head)
			slog.tail = NULL;
		slog.done_seq = e->seq;
		slog.nr_pending--;
		pthread_cond_broadcast(&slog.cv_done);
		ticket = e->ticket;
		work = e->work;
		sfr__unlock(&slog.mu);
		if (e->kind == SFR__LOG_SAVE) {
			sfr_ticket_put(ticket); /* e is part of it */
		} else if (e->kind == SFR__LOG_WORK) {
			sfr__work_left_log(work); /* and of this */
		} else {
			sfr_sys.free(e->key);
			sfr_sys.free(e);
		}
		sfr__lock(&slog.mu);
	}
	sfr__unlock(&slog.mu);
	return NULL;
}

int sfr__log_start(void)
{
	int rc;

	sfr__lock(&slog.mu);
	rc = init_locked();
	if (rc == 0 && !slog.running) {
		rc = sfr__thread_start(&slog.thread, "sfr-log", log_main, NULL);
		slog.running = rc == 0;
	}
	sfr__unlock(&slog.mu);
	return rc;
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
	sfr__lock(&slog.mu);
	slog.running = slog.stopping = false;
	sfr__unlock(&slog.mu);
	return 0;
}

/* ---- saves, called by ticket.c with the engine's mutex held ---- */

void sfr__log_append(struct sfr__log_entry *entry)
{
	sfr__lock(&slog.mu);
	append_locked(entry);
	sfr__unlock(&slog.mu);
}

void sfr__log_ready(struct sfr__log_entry *entry)
{
	sfr__lock(&slog.mu);
	entry->ready = true;
	pthread_cond_signal(&slog.cv_work);
	sfr__unlock(&slog.mu);
}

void sfr__log_ended(struct sfr__log_entry *entry, bool ok)
{
	sfr__lock(&slog.mu);
	entry->ended = true;
	entry->ok = ok;
	pthread_cond_signal(&slog.cv_work);
	sfr__unlock(&slog.mu);
}

void sfr__log_work_ended(struct sfr__log_entry *entry, bool ok)
{
	sfr__lock(&slog.mu);
	if (!entry->ended) {
		entry->ended = true;
		entry->ok = ok;
		pthread_cond_signal(&slog.cv_work);
	}
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
		struct sfr__log_entry *e = slog.head;

		if (e && e->kind == SFR__LOG_WORK && e->ready && !e->ended) {
			e->ready = false;
			e->taken = true;
			*number = sfr_log_work_number(e->work);
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

uint64_t sfr__log_last_remove(void)
{
	uint64_t seq;

	sfr__lock(&slog.mu);
	seq = slog.last_remove_seq;
	sfr__unlock(&slog.mu);
	return seq;
}

/* ---- removes, questions, loads ---- */

int sfr_log_remove(const char *key, uint64_t *seq_out)
{
	struct sfr__log_entry *e = NULL;
	size_t len = strlen(key) + 1;
	int rc = sfr_fork_init();

	if (rc == 0)
		rc = sfr__log_start();
	if (rc < 0)
		return rc;
	e = sfr_sys.calloc(1, sizeof(*e));
	if (!e)
		return -ENOMEM;
	e->kind = SFR__LOG_REMOVE;
	e->key = sfr_sys.malloc(len);
	if (!e->key) {
		sfr_sys.free(e);
		return -ENOMEM;
	}
	memcpy(e->key, key, len);
	sfr__lock(&slog.mu);
	append_locked(e);
	slog.last_remove_seq = e->seq;
	if (seq_out)
		*seq_out = e->seq;
	sfr__unlock(&slog.mu);
	return 0;
}

int sfr_log_exists(const char *key)
{
	struct sfr__log_entry *e;
	int answer = -1;

	sfr__lock(&slog.mu);
	e = last_touching_locked(key);
	/* A save that has failed by now leaves the name as it was; whoever asks gets that from
	 * the file system, which an earlier entry may still change: then the earlier one says. */
	while (e && creates(e) && e->ended && !e->ok) {
		struct sfr__log_entry *before = NULL;

		for (struct sfr__log_entry *p = slog.head; p != e; p = p->next)
			if (touches(p, key))
				before = p;
		e = before;
	}
	if (e)
		answer = creates(e);
	sfr__unlock(&slog.mu);
	return answer;
}

int sfr_log_load_new(const char *key, struct sfr_log_load **out)
{
	size_t len = strlen(key) + 1;
	struct sfr_log_load *load = sfr_sys.calloc(1, sizeof(*load));
	struct sfr__log_entry *e;
	int rc;

	*out = NULL;
	if (!load)
		return -ENOMEM;
	load->fd = -1;
	load->fork_generation = sfr_fork_generation();
	load->key = sfr_sys.malloc(len);
	if (!load->key) {
		sfr_sys.free(load);
		return -ENOMEM;
	}
	memcpy(load->key, key, len);
	sfr__lock(&slog.mu);
	rc = init_locked();
	e = rc == 0 ? last_touching_locked(key) : NULL;
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
