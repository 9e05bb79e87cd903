/* The commit of a save: its entry in the log renames the file when the entry is at the head of the
 * log (commit/log.c). If the save is unordered, a writer renames its file.
 *
 * The commit checks its destination: a directory gives EISDIR, and a special file EINVAL. The call
 * has checked this too, but an earlier remove in the log may have changed what is there. */
#include "save/write.h"
#include "trace/trace.h"

static struct sfr_ticket *ticket_of(struct sfr__log_entry *entry)
{
	return sfr__container(entry, struct sfr_ticket, log);
}

/* Renames the temporary; a stream has none. Its span in a trace must end before the save's end is
 * reported. */
static void rename_file(struct sfr_ticket *t, struct sfr_err *err)
{
	SFR__TRACE(SFR_TRACE_COMMIT, t->number, 0);
	if (!sfr__ticket_is_stream(t))
		(void)sfr__file_commit(&t->file, err); /* err holds the result */
	sfr__file_fini(&t->file);
}

bool sfr__save_commit(struct sfr_ticket *t)
{
	struct sfr_err err = { .index = -1 };

	if (!sfr__ticket_begin_commit(t))
		return false;
	rename_file(t, &err);
	sfr__ticket_finish(t, &err);
	return true;
}

static void run_commit(struct sfr__log_entry *entry, bool after_good)
{
	(void)after_good;                         /* matters only to removes */
	(void)sfr__save_commit(ticket_of(entry)); /* false: a writer ends the cancelled save */
}

/* Drops the log's reference, which sfr_save_launch took. */
static void drop_logs_ref(struct sfr__log_entry *entry)
{
	sfr_ticket_put(ticket_of(entry));
}

/* Returns since when the file system has not answered a call about the save's file, or 0. */
static uint64_t asked_since(const struct sfr__log_entry *entry)
{
	return sfr__file_asked_since(&sfr__container(entry, const struct sfr_ticket, log)->file);
}

const struct sfr__log_ops sfr__save_log_ops = { .creates = true,
						.is_save = true,
						.run = run_commit,
						.left = drop_logs_ref,
						.asked_since = asked_since };
