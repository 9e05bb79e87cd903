/* Decides which saves overtake entries on a file system that does not answer.
 *
 * A rename, a sync or a remove on a mount that hangs never returns. In the log's order everything
 * after it would wait, even saves to healthy local disks. So if a file system has not answered for
 * 20 s, saves to other file systems overtake its entries, and a notice says so:
 *
 *     [A /nfs: renaming for 20 s]  [B /nfs: ready]  [remove of /ssd/old]  [C /ssd: ready]
 *                                                                          runs now
 *
 * A save overtakes if it is ready, its file system answers, and no entry in front of it concerns
 * its name. It keeps its position in the list. Removes and external work never overtake, because a
 * remove is promised to come after every save before it. So while a mount hangs, old checkpoints
 * may remain, but none is missing. A file system that is slow but answers is never overtaken. */
#include <stdio.h>

#include "commit/log_int.h"

#define NS_PER_S 1000000000u

bool sfr__log_can_leave_list_locked(const struct sfr__log_entry *e)
{
	return sfr__log_has_ended(e) && !e->loads && e->fs_wait_since_ns == 0;
}

/* Returns since when this entry has been waiting for its file system, or 0. */
static uint64_t fs_wait_since_locked(const struct sfr__log_entry *e)
{
	uint64_t since = atomic_load_explicit(&e->fs_wait_since_ns, memory_order_relaxed);

	if (since != 0) /* a thread of the log is waiting */
		return since;
	if (sfr__log_has_ended(e) || !e->ops->fs_wait_since)
		return 0;
	return e->ops->fs_wait_since(e); /* the entry's writers may be waiting */
}

/* Returns the seconds that this entry has been waiting for its file system. */
static unsigned seconds_waited_locked(const struct sfr__log_entry *e, uint64_t now)
{
	return (unsigned)((now - fs_wait_since_locked(e)) / NS_PER_S);
}

/* Returns whether this entry has waited for its file system for at least patience_ns. */
static bool hangs_locked(const struct sfr__log_entry *e, uint64_t now)
{
	uint64_t since = fs_wait_since_locked(e);

	return since != 0 && now > since && now - since >= sfr__log.patience_ns;
}

/* Returns whether an entry hangs on this file system. An unknown file system (0) counts as one that
 * does not hang. */
static bool fs_hangs_locked(uint64_t fs, uint64_t now)
{
	for (struct sfr__log_entry *e = sfr__log.entries.head; e; e = e->next)
		if (fs != 0 && e->fs == fs && hangs_locked(e, now))
			return true;
	return false;
}

/* Returns whether the entry is a save that the core writes. External work may be a save, too. */
static bool is_core_save(const struct sfr__log_entry *e)
{
	return e->ops->is_save && e->ops->run; /* external work has no `run` */
}

/* Returns whether some thread works for this entry now, in the core or outside. */
static bool is_in_progress(const struct sfr__log_entry *e)
{
	const bool is_external = !e->ops->run;

	if (is_core_save(e))
		return true; /* writers work on it before it is ready */
	if (is_external && e->state == SFR__LOG_READY)
		return true; /* it is the head: code outside the core works on it */
	return e->state == SFR__LOG_RUNNING || e->fs_wait_since_ns != 0;
}

bool sfr__log_may_overtake_locked(const struct sfr__log_entry *e, uint64_t now)
{
	if (!is_core_save(e) || e->state != SFR__LOG_READY)
		return false;
	if (e->fs == 0 || fs_hangs_locked(e->fs, now))
		return false;
	for (const struct sfr__log_entry *front = sfr__log.entries.head; front != e;
	     front = front->next) {
		if (sfr__log_can_leave_list_locked(front))
			continue;
		if (sfr__log_concerns(front, e->key))
			return false;
		/* An entry that is in progress and does not hang ends soon: wait for it. Other
		 * entries may be overtaken, because they hang or wait for an entry that does. */
		if (is_in_progress(front) && !fs_hangs_locked(front->fs, now))
			return false;
	}
	return true;
}

bool sfr__log_may_overtake_later_locked(const struct sfr__log_entry *e)
{
	if (!is_core_save(e) || e->state != SFR__LOG_READY)
		return false;
	if (e->fs_wait_since_ns != 0 || e->fs == 0)
		return false; /* a thread works on it, or its file system is unknown */
	for (const struct sfr__log_entry *front = sfr__log.entries.head; front != e;
	     front = front->next)
		if (front->fs_wait_since_ns != 0 && front->fs != 0 && front->fs != e->fs)
			return true;
	return false;
}

/* Returns whether a notice was posted for this file system, by an entry that is still in the
 * list. */
static bool is_hang_reported_locked(uint64_t fs)
{
	for (const struct sfr__log_entry *e = sfr__log.entries.head; e; e = e->next)
		if (e->fs == fs && e->hang_reported)
			return true;
	return false;
}

void sfr__log_report_hangs_locked(const struct sfr__log_entry *e, uint64_t now)
{
	for (struct sfr__log_entry *front = sfr__log.entries.head; front != e;
	     front = front->next) {
		if (!hangs_locked(front, now) || is_hang_reported_locked(front->fs))
			continue;
		front->hang_reported = true;
		sfr__notice_post_text(
			"the file system of %s has not answered for %u s: saves to "
			"others go on without it; its own saves, and all removes, wait",
			front->key, seconds_waited_locked(front, now));
	}
}

int sfr_log_describe_hang(char *text, size_t len)
{
	uint64_t now = sfr__now_ns();
	int found = 0;

	sfr__lock(&sfr__log.mu);
	for (const struct sfr__log_entry *e = sfr__log.entries.head; e && !found; e = e->next) {
		if (!hangs_locked(e, now))
			continue;
		found = 1;
		(void)snprintf(text, len, "the file system of %s has not answered for %u s", e->key,
			       seconds_waited_locked(e, now));
	}
	sfr__unlock(&sfr__log.mu);
	return found;
}
