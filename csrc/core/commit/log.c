/* The process's ordered log: renames and removes take effect in the order of submission.
 *
 * The log is one list, oldest entry first (list.c), and a thread (`sfr-log`) that works on its
 * head:
 *
 *   WAITING ──▶ READY ──at the head──▶ RUNNING ──▶ SUCCEEDED, FAILED ──its loads are open──▶ left
 *      └───────── a save that fails before it is ready ───────▲
 *
 *   a save     ready once it is synced; its run renames the file and syncs the directory
 *              (save/commit.c)
 *   a remove   ready at once; its run removes the name, unless the last save before the remove did
 *              not become durable (removes.c)
 *   external   ready once it is the head; code outside the core does the work (work.c)
 *
 * A rotation (save the new, remove the old) never leaves fewer durable checkpoints than before,
 * because the remove comes after the save in the list.
 *
 * Saves may overtake entries whose file system does not answer (aside.c). A thread of the log may
 * hang in such a file system. So the log starts another thread before it works on an entry that a
 * later save might overtake. All threads run the same loop (log_main): each takes the next possible
 * step. At most one thread waits for work; other threads without work end.
 *
 * The engine's writers write and sync a save's data before, and never wait for the log. */
#include "commit/log_int.h"

#define MAX_THREADS 4 /* if three file systems hang, one thread still works */

/* ---- threads ---- */

static void *log_main(void *unused);

/* Returns 0 or -errno. */
static int start_thread_locked(void)
{
	pthread_t thread; /* not kept: when the thread ends, it sets sfr__log.ended_thread */
	int rc = sfr__thread_start(&thread, "sfr-log", SFR__BACKGROUND, log_main, NULL);

	if (rc == 0)
		sfr__log.nr_threads++;
	return rc;
}

/* Starts another thread if all threads are busy, and an entry may have to overtake. */
static void start_spare_thread_locked(void)
{
	const bool all_busy = sfr__log.nr_threads > 0 && sfr__log.nr_idle == 0;

	if (!all_busy || sfr__log.nr_threads == MAX_THREADS)
		return;
	for (const struct sfr__log_entry *e = sfr__log.entries.head; e; e = e->next)
		if (sfr__log_may_overtake_later_locked(e)) {
			/* if this fails, the entry only waits longer */
			(void)start_thread_locked();
			return;
		}
}

/* Release the lock for work on an entry, and take it again afterwards. In between fs_wait_since_ns
 * is not 0, so no other thread works on the entry or frees it. */
static void unlock_for_entry_locked(struct sfr__log_entry *e)
{
	e->fs_wait_since_ns = sfr__now_ns();
	start_spare_thread_locked();
	sfr__unlock(&sfr__log.mu);
}

static void relock_after_entry_locked(struct sfr__log_entry *e)
{
	sfr__lock(&sfr__log.mu);
	e->fs_wait_since_ns = 0;
}

/* Does the entry's work. Releases the lock meanwhile. */
static void run_entry_locked(struct sfr__log_entry *e)
{
	bool last_save_ok = !sfr__log.last_save_failed;

	e->state = SFR__LOG_RUNNING;
	unlock_for_entry_locked(e);
	e->ops->run(e, last_save_ok);
	relock_after_entry_locked(e);
}

/* Opens the entry's loads. Releases the lock meanwhile, so other threads may add loads to it. */
static void open_loads_locked(struct sfr__log_entry *e)
{
	struct sfr_log_load *loads = e->loads;

	e->loads = NULL;
	unlock_for_entry_locked(e);
	sfr__log_open_loads(loads);
	relock_after_entry_locked(e);
}

/* Removes the head `e` from the list, and calls its `release` without the lock. */
static void remove_head_locked(struct sfr__log_entry *e)
{
	if (e->ops->is_save)
		sfr__log.last_save_failed = e->state == SFR__LOG_FAILED;
	(void)sfr__queue_pop(&sfr__log.entries); /* returns `e` */
	sfr__log.done_seq = e->seq;
	sfr__log.nr_pending--;
	pthread_cond_broadcast(&sfr__log.cv_done);
	sfr__unlock(&sfr__log.mu);
	e->ops->release(e);
	sfr__lock(&sfr__log.mu);
}

/* Returns whether an ended entry has loads, and they may be opened: every entry in front of it that
 * concerns its name is over. */
static bool may_open_loads_locked(const struct sfr__log_entry *e)
{
	for (const struct sfr__log_entry *front = sfr__log.entries.head; front != e;
	     front = front->next)
		if (!sfr__log_can_leave_list_locked(front) && sfr__log_concerns(front, e->key))
			return false;
	return e->loads != NULL;
}

/* Makes external work at the head ready, and wakes the threads that wait for it. */
static void offer_external_work_locked(struct sfr__log_entry *head)
{
	const bool is_external = !head->ops->run;

	if (is_external && head->state == SFR__LOG_WAITING) {
		head->state = SFR__LOG_READY;
		pthread_cond_broadcast(&sfr__log.cv_done);
	}
}

/* Returns whether a thread of the log may run this entry now. */
static bool may_run_locked(const struct sfr__log_entry *e, uint64_t now)
{
	if (e == sfr__log.entries.head)
		return e->state == SFR__LOG_READY && e->ops->run;
	return sfr__log_may_overtake_locked(e, now);
}

/* Takes the first possible step: removes the head, opens loads, or runs an entry. Returns false if
 * no step is possible. */
static bool advance_log_locked(void)
{
	struct sfr__log_entry *head = sfr__log.entries.head;
	uint64_t now = head ? sfr__now_ns() : 0;

	if (head && sfr__log_can_leave_list_locked(head)) {
		remove_head_locked(head);
		return true;
	}
	if (head)
		offer_external_work_locked(head);
	for (struct sfr__log_entry *e = head; e; e = e->next) {
		bool ended = sfr__log_has_ended(e);

		if (e->fs_wait_since_ns != 0)
			continue; /* a thread is working on it */
		if (ended && may_open_loads_locked(e)) {
			open_loads_locked(e);
			return true;
		}
		if (!ended && may_run_locked(e, now)) {
			if (e != head) /* it overtakes entries that hang */
				sfr__log_report_hangs_locked(e, now);
			run_entry_locked(e);
			return true;
		}
	}
	return false;
}

/* Called by a thread of the log before it ends; releases the lock. Joins the thread that ended
 * before, so at most one ended thread is not joined. */
static void deregister_ending_thread_locked(void)
{
	bool has_previous = sfr__log.has_ended_thread;
	pthread_t previous = sfr__log.ended_thread;

	sfr__log.ended_thread = pthread_self();
	sfr__log.has_ended_thread = true;
	sfr__log.nr_threads--;
	if (sfr__log.nr_threads == 0)
		sfr__log.stopping = false; /* the next sfr__log_reserve starts a thread again */
	pthread_cond_broadcast(&sfr__log.cv_done);
	sfr__unlock(&sfr__log.mu);
	if (has_previous)
		(void)sfr_sys.thread_join(previous, NULL); /* cannot fail: it is joinable */
}

static void *log_main(void *unused)
{
	(void)unused;
	sfr__lock(&sfr__log.mu);
	for (;;) {
		/* Wait no longer: nothing wakes the thread when an entry begins to hang. */
		uint64_t max_wait_ns = sfr__log.patience_ns;

		if (advance_log_locked())
			continue;
		if (sfr__log.nr_idle > 0)
			break; /* one waiting thread is enough */
		if (sfr__log.stopping && !sfr__log.entries.head && sfr__log.nr_reserved == 0)
			break;
		sfr__log.nr_idle++;
		(void)sfr__cond_wait(&sfr__log.cv_work, &sfr__log.mu, sfr__deadline(max_wait_ns));
		sfr__log.nr_idle--;
	}
	deregister_ending_thread_locked();
	return NULL;
}

int sfr__log_reserve(void)
{
	int rc;

	sfr__lock(&sfr__log.mu);
	rc = sfr__log_init_locked();
	if (rc == 0 && sfr__log.nr_threads == 0)
		rc = start_thread_locked();
	if (rc == 0)
		sfr__log.nr_reserved++;
	sfr__unlock(&sfr__log.mu);
	return rc;
}

void sfr__log_unreserve(void)
{
	sfr__lock(&sfr__log.mu);
	sfr__log.nr_reserved--;
	pthread_cond_signal(&sfr__log.cv_work); /* a thread may end, if the log is being stopped */
	sfr__unlock(&sfr__log.mu);
}

int sfr_log_stop(void)
{
	pthread_t last;
	bool has_last;

	sfr__lock(&sfr__log.mu);
	if (sfr__log.nr_threads == 0 || sfr__log.stopping) {
		sfr__unlock(&sfr__log.mu);
		return 0;
	}
	sfr__log.stopping = true;
	sfr__log.nr_stops++;
	pthread_cond_signal(&sfr__log.cv_work);
	pthread_cond_broadcast(&sfr__log.cv_done); /* wakes threads that wait for external work */
	while (sfr__log.stopping)                  /* the last thread to end clears it */
		(void)sfr__cond_wait(&sfr__log.cv_done, &sfr__log.mu, SFR_FOREVER);
	last = sfr__log.ended_thread;
	has_last = sfr__log.has_ended_thread;
	sfr__log.has_ended_thread = false;
	sfr__unlock(&sfr__log.mu);
	if (has_last)
		(void)sfr_sys.thread_join(last, NULL); /* cannot fail: it is joinable */
	return 0;
}

/* ---- entries; saves call these functions with the engine's mutex held ---- */

uint64_t sfr__log_append(struct sfr__log_entry *entry)
{
	uint64_t seq;

	sfr__lock(&sfr__log.mu);
	sfr__log.last_seq++;
	seq = entry->seq = sfr__log.last_seq;
	if (entry->ops->close_waits)
		sfr__log.close_seq = seq;
	sfr__queue_push(&sfr__log.entries, entry);
	sfr__log.nr_pending++;
	sfr__log.nr_reserved--;
	pthread_cond_signal(&sfr__log.cv_work);
	sfr__unlock(&sfr__log.mu);
	return seq;
}

void sfr__log_mark_ready(struct sfr__log_entry *entry)
{
	sfr__lock(&sfr__log.mu);
	if (entry->state == SFR__LOG_WAITING)
		entry->state = SFR__LOG_READY;
	pthread_cond_signal(&sfr__log.cv_work);
	start_spare_thread_locked();
	sfr__unlock(&sfr__log.mu);
}

void sfr__log_mark_ended(struct sfr__log_entry *entry, bool succeeded)
{
	sfr__lock(&sfr__log.mu);
	if (!sfr__log_has_ended(entry))
		entry->state = succeeded ? SFR__LOG_SUCCEEDED : SFR__LOG_FAILED;
	pthread_cond_signal(&sfr__log.cv_work);
	sfr__unlock(&sfr__log.mu);
}

int sfr__log_take_external_work(uint64_t slice_ns, uint64_t *number, bool *last_save_ok)
{
	uint64_t deadline = sfr__deadline(slice_ns), nr_stops;
	int rc;

	*number = 0;
	sfr__lock(&sfr__log.mu);
	rc = sfr__log_init_locked();
	nr_stops = sfr__log.nr_stops;
	while (rc == 0) {
		struct sfr__log_entry *e = sfr__log.entries.head;
		const bool is_external = e && !e->ops->run;

		if (is_external && e->state == SFR__LOG_READY) {
			e->state = SFR__LOG_RUNNING;
			*number = e->number;
			*last_save_ok = !sfr__log.last_save_failed;
			break;
		}
		if (sfr__log.nr_stops != nr_stops && !e)
			rc = SFR_ECLOSED; /* sfr_log_stop was called, and the log is empty */
		else
			rc = sfr__cond_wait(&sfr__log.cv_done, &sfr__log.mu, deadline);
	}
	sfr__unlock(&sfr__log.mu);
	return rc;
}
