/* External work: an action of code outside the core that must keep the log's order. For example, a
 * link may be made only when its target exists, and before an older target is removed. The log
 * stops at the entry of such an action until the action is done:
 *
 *   new ──append──▶ WAITING ──at the head──▶ READY ──next──▶ RUNNING ──end──▶ SUCCEEDED, FAILED
 *
 * An entry has two owners: its maker, and the log while the entry is in the log. */
#include <errno.h>
#include <stdatomic.h>

#include "commit/log.h"

struct sfr_external_work {
	struct sfr__log_entry entry; /* must be the first member */
	atomic_uint refs;            /* its maker's and the log's */
	atomic_bool appended;
	uint64_t fork_generation; /* constant */
};

/* Returns whether the entry was made by the parent of this process. */
static bool is_inherited(const struct sfr_external_work *work)
{
	return work->fork_generation != sfr_fork_generation();
}

static void drop_ref(struct sfr_external_work *work)
{
	if (atomic_fetch_sub(&work->refs, 1) > 1)
		return;
	sfr_sys.free(work->entry.key);
	sfr_sys.free(work);
}

static void drop_logs_ref(struct sfr__log_entry *entry)
{
	drop_ref((struct sfr_external_work *)entry);
}

int sfr_external_work_new(const char *key, enum sfr_external_work_kind kind,
			  struct sfr_external_work **out)
{
	/* without `run`, because code outside the core does the work */
	static const struct sfr__log_ops ops[] = {
		[SFR_WORK_SAVE] = { .creates = true, .is_save = true, .release = drop_logs_ref },
		[SFR_WORK_REMOVE] = { .release = drop_logs_ref },
		[SFR_WORK_LINK] = { .creates = true, .release = drop_logs_ref },
		[SFR_WORK_DIRECTORY] = { .creates = true,
					 .is_save = true,
					 .makes_directory = true,
					 .release = drop_logs_ref },
	};
	static _Atomic uint64_t nr_works;
	struct sfr_external_work *work;
	int rc = sfr_fork_init();

	*out = NULL;
	if (rc < 0)
		return rc;
	if ((unsigned)kind >= sizeof(ops) / sizeof(ops[0]))
		return -EINVAL;
	work = sfr_sys.calloc(1, sizeof(*work));
	if (!work)
		return -ENOMEM;
	work->entry.ops = &ops[kind];
	work->entry.number = atomic_fetch_add_explicit(&nr_works, 1, memory_order_relaxed) + 1;
	work->entry.key = sfr__text_copy(key);
	if (!work->entry.key) {
		sfr_sys.free(work);
		return -ENOMEM;
	}
	work->fork_generation = sfr_fork_generation();
	atomic_init(&work->refs, 1);
	atomic_init(&work->appended, false);
	*out = work;
	return 0;
}

int sfr_external_work_append(struct sfr_external_work *work)
{
	int rc;

	if (is_inherited(work))
		return SFR_EFORK;
	rc = sfr__log_reserve(); /* comes first, because it may fail */
	if (rc < 0)
		return rc;
	if (atomic_exchange(&work->appended, true)) { /* it was appended before */
		sfr__log_unreserve();
		return SFR_ESTATE;
	}
	atomic_fetch_add(&work->refs, 1); /* the log's */
	(void)sfr__log_append(&work->entry);
	return 0;
}

uint64_t sfr_external_work_number(const struct sfr_external_work *work)
{
	return work->entry.number;
}

int sfr_external_work_take_next(uint64_t slice_ns, uint64_t *number, int *after_good)
{
	bool last_save_ok = true;
	int rc = sfr__log_take_external_work(slice_ns, number, &last_save_ok);

	*after_good = last_save_ok;
	return rc;
}

void sfr_external_work_mark_ended(struct sfr_external_work *work, int ok)
{
	if (!is_inherited(work) && atomic_load(&work->appended))
		sfr__log_mark_ended(&work->entry, ok != 0);
}

void sfr_external_work_put(struct sfr_external_work *work)
{
	if (!work || is_inherited(work))
		return; /* a forked child leaves its parent's entry as it is */
	sfr_external_work_mark_ended(work, 0); /* a failure, unless the work has ended before */
	drop_ref(work);
}
