/* The commit of a save: its entry in the log, which renames the file when it is at the head of the
 * log (commit/log.c). A save without order has no entry; a writer renames its file.
 *
 * The commit checks its destination first: a directory gives EISDIR, and a special file EINVAL. The
 * call checks this too. But a remove in the log may delete what the call finds, so only the commit
 * can decide. */
#include "save/write.h"
#include "trace/trace.h"

static struct sfr_ticket *ticket_of(struct sfr__log_entry *entry)
{
	return sfr__container(entry, struct sfr_ticket, log);
}

/* Renames the temporary; a stream has none. This is a function of its own, so that its span in a
 * trace ends before the save's end is reported. */
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
	(void)sfr__save_commit(ticket_of(entry)); /* a failed commit has ended the save already */
}

/* The entry's ops->left. */
static void drop_logs_ref(struct sfr__log_entry *entry)
{
	sfr_ticket_put(ticket_of(entry)); /* the log's reference, taken by sfr_save_launch */
}

/* Returns the time since which a writer has been waiting for the file system to answer a call about
 * the save's file, or 0. */
static uint64_t asked_since(const struct sfr__log_entry *entry)
{
	return sfr__file_asked_since(&sfr__container(entry, const struct sfr_ticket, log)->file);
}

const struct sfr__log_ops sfr__save_log_ops = { .creates = true,
						.is_save = true,
						.run = run_commit,
						.left = drop_logs_ref,
						.asked_since = asked_since };
