/* Decides which saves overtake entries whose file system does not answer.
 *
 * A rename, a sync or a remove on a mount that hangs never returns. In the log's order everything
 * after it would wait, even saves to healthy local disks. So a file system that has not answered
 * for 20 s is set aside, with a notice, until it answers:
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

bool sfr__log_is_over_locked(const struct sfr__log_entry *e)
{
	return sfr__log_has_ended(e) && !e->loads && e->asked_ns == 0;
}

/* Returns since when this entry has been waiting for its file system, or 0. */
static uint64_t asked_since_locked(const struct sfr__log_entry *e)
{
	uint64_t own = atomic_load_explicit(&e->asked_ns, memory_order_relaxed);

	if (own || sfr__log_has_ended(e) || !e->ops->asked_since)
		return own;
	return e->ops->asked_since(e);
}

/* Returns whether an entry has waited for its file system for at least patience_ns. */
static bool hangs_locked(const struct sfr__log_entry *e, uint64_t now)
{
	uint64_t since = asked_since_locked(e);

	return since && now > since && now - since >= sfr__log.patience_ns;
}

/* Returns the first entry that hangs on this file system, or NULL. `fs` 0 means unknown, and never
 * hangs. */
static struct sfr__log_entry *hanging_on_locked(uint64_t fs, uint64_t now)
{
	for (struct sfr__log_entry *e = sfr__log.entries.head; e; e = e->next)
		if (fs && e->fs == fs && hangs_locked(e, now))
			return e;
	return NULL;
}

static bool is_own_save(const struct sfr__log_entry *e)
{
	return e->ops->is_save && e->ops->run; /* external work has no `run` */
}

/* Returns whether an entry has begun, or will begin without waiting for entries in front of it. */
static bool is_under_way(const struct sfr__log_entry *e)
{
	const bool is_external = !e->ops->run;

	if (is_own_save(e)) /* its writers are at work before it is ready */
		return true;
	if (is_external && e->state == SFR__LOG_READY)
		return true;
	return e->state == SFR__LOG_RUNNING || e->asked_ns != 0;
}

bool sfr__log_may_overtake_locked(const struct sfr__log_entry *e, uint64_t now)
{
	if (!is_own_save(e) || e->state != SFR__LOG_READY || e->fs == 0 ||
	    hanging_on_locked(e->fs, now))
		return false;
	for (const struct sfr__log_entry *b = sfr__log.entries.head; b != e; b = b->next) {
		if (sfr__log_is_over_locked(b))
			continue;
		if (sfr__log_concerns(b, e->key))
			return false;
		/* An entry that is under way is overtaken only if it hangs. Any other entry waits
		 * for those in front of it, which this loop has checked. */
		if (is_under_way(b) && !hanging_on_locked(b->fs, now))
			return false;
	}
	return true;
}

bool sfr__log_may_overtake_later_locked(const struct sfr__log_entry *e)
{
	if (!is_own_save(e) || e->state != SFR__LOG_READY || e->asked_ns != 0 || e->fs == 0)
		return false;
	for (const struct sfr__log_entry *b = sfr__log.entries.head; b != e; b = b->next)
		if (b->asked_ns != 0 && b->fs != 0 && b->fs != e->fs)
			return true;
	return false;
}

static bool is_notified_locked(uint64_t fs)
{
	for (const struct sfr__log_entry *e = sfr__log.entries.head; e; e = e->next)
		if (e->fs == fs && e->notified)
			return true;
	return false;
}

void sfr__log_report_aside_locked(const struct sfr__log_entry *e, uint64_t now)
{
	for (struct sfr__log_entry *b = sfr__log.entries.head; b != e; b = b->next) {
		if (!hangs_locked(b, now) || is_notified_locked(b->fs))
			continue;
		b->notified = true;
		sfr__notice_text("the file system of %s has not answered for %u s: saves to "
				 "others go on without it; its own saves, and all removes, wait",
				 b->key, (unsigned)((now - asked_since_locked(b)) / 1000000000u));
	}
}

int sfr_log_unanswered(char *text, size_t len)
{
	uint64_t now = sfr__now_ns();
	int found = 0;

	sfr__lock(&sfr__log.mu);
	for (const struct sfr__log_entry *e = sfr__log.entries.head; e && !found; e = e->next) {
		if (!hangs_locked(e, now))
			continue;
		found = 1;
		(void)snprintf(text, len, "the file system of %s has not answered for %u s", e->key,
			       (unsigned)((now - asked_since_locked(e)) / 1000000000u));
	}
	sfr__unlock(&sfr__log.mu);
	return found;
}
