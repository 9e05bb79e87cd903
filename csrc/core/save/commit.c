/* A save's entry in the log: its rename, when its turn has come. See commit/log.c.
 *
 * The data file of a checkpoint of many ranks is one of several, and has a name of its own. What
 * has its turn in the log is the checkpoint; it waits for such files, so they take a place in front
 * of it once they are written (SFR_SAVE_OWN_NAME).
 *
 * It looks at its destination first: a directory gives EISDIR and a special file EINVAL here too
 * and not only in the call, since an earlier remove in the log may have been what made room.
 */
#include "save/save.h"
#include "trace/trace.h"

static struct sfr_ticket *ticket_of(struct sfr__log_entry *entry)
{
	return sfr__container(entry, struct sfr_ticket, log);
}

/* A span of its own: it has ended before anybody hears of the save's end. */
static void rename_file(struct sfr_ticket *t, struct sfr_err *err)
{
	SFR__TRACE(SFR_TRACE_COMMIT, t->number, 0);
	(void)sfr__file_commit(&t->file, err); /* err holds what it returns */
	sfr__file_fini(&t->file);
}

static void run(struct sfr__log_entry *entry, bool after_good)
{
	struct sfr_ticket *t = ticket_of(entry);
	struct sfr_err err = { .index = -1 };

	(void)after_good; /* a save takes nothing away */
	if (!sfr__ticket_begin_commit(t))
		return; /* cancelled in time: it ends as any failed save does */
	rename_file(t, &err);
	sfr__ticket_finish(t, &err);
}

static void left(struct sfr__log_entry *entry)
{
	sfr_ticket_put(ticket_of(entry));
}

static uint64_t asked_since(const struct sfr__log_entry *entry)
{
	return sfr__file_asked_since(&sfr__container(entry, const struct sfr_ticket, log)->file);
}

const struct sfr__log_ops sfr__save_log_ops = {
	.creates = true, .is_save = true, .run = run, .left = left, .asked_since = asked_since
};

/* Removes that depend on how the last save ended mean one of a name that others know. */
const struct sfr__log_ops sfr__own_name_log_ops = {
	.creates = true, .run = run, .left = left, .asked_since = asked_since
};
