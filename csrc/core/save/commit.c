/* The commit of a save: its entry in the log renames the file when the entry is at the head of the
 * log (commit/log.c). An unordered save has no entry: a writer renames its file.
 *
 * The commit checks its destination: a directory gives EISDIR, and a special file EINVAL. The call
 * has checked this too, but an earlier remove in the log may have changed what is there. */
#include "save/write.h"
#include "trace/trace.h"

static struct sfr_ticket *ticket_of(struct sfr__log_entry *entry)
{
	return sfr__container(entry, struct sfr_ticket, log);
}

/* Renames the temporary file; a stream has none. A function of its own, so that the span in the
 * trace ends before the save's end is reported. */
static void rename_file(struct sfr_ticket *t, struct sfr_err *err)
{
	SFR__TRACE(SFR_TRACE_COMMIT, t->number, 0);
	if (!sfr__ticket_is_stream(t))
		(void)sfr__file_commit(&t->file, err); /* an error is also in *err */
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

static void run_commit(struct sfr__log_entry *entry, bool last_save_ok)
{
	(void)last_save_ok;                       /* matters only to removes */
	(void)sfr__save_commit(ticket_of(entry)); /* false: cancelled; a writer ends the save */
}

/* Drops the reference that sfr_save_launch took for the log. */
static void drop_logs_ref(struct sfr__log_entry *entry)
{
	sfr_ticket_put(ticket_of(entry));
}

/* Returns since when the save's writers have waited for the file system, or 0 if they do not. */
static uint64_t fs_wait_since(const struct sfr__log_entry *entry)
{
	return sfr__file_unanswered_since(&sfr__container(entry, const struct sfr_ticket, log)
						   ->file);
}

const struct sfr__log_ops sfr__save_log_ops = { .creates = true,
						.is_save = true,
						.run = run_commit,
						.release = drop_logs_ref,
						.fs_wait_since = fs_wait_since };
