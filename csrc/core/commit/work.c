/* Work that others do in the log's order.
 *
 * Not everything that has to keep the log's order is a save or a remove of ours. A link may be
 * made only once its target is there, and before an older target is removed; a checkpoint that
 * other code writes has to be waited for by loads and removes like one of ours. Such work takes
 * its place in the log by an entry, and the log stands still while it is done:
 *
 *   NEW --append--> IN LOG --at the head, next--> TAKEN --end--> ENDED --> left the log
 *
 * Two own an entry: whoever made it, and the log while it is in there. The last one frees it.
 */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "commit/log.h"

struct sfr_log_work {
	struct sfr__log_entry entry; /* guarded by the log's mutex once appended */
	uint64_t number;             /* constant, as kind and fork_generation */
	atomic_uint refs;
	atomic_bool appended;
	enum sfr_work_kind kind;
	uint64_t fork_generation;
};

static bool foreign(const struct sfr_log_work *work)
{
	return work->fork_generation != sfr_fork_generation();
}

static void drop(struct sfr_log_work *work)
{
	if (atomic_fetch_sub(&work->refs, 1) > 1)
		return;
	sfr_sys.free(work->entry.key);
	sfr_sys.free(work);
}

int sfr_log_work_new(const char *key, enum sfr_work_kind kind, struct sfr_log_work **out)
{
	static _Atomic uint64_t nr_works;
	size_t len = strlen(key) + 1;
	struct sfr_log_work *work;
	int rc = sfr_fork_init();

	*out = NULL;
	if (rc < 0)
		return rc;
	if (kind != SFR_WORK_SAVE && kind != SFR_WORK_REMOVE && kind != SFR_WORK_LINK)
		return -EINVAL;
	work = sfr_sys.calloc(1, sizeof(*work));
	if (!work)
		return -ENOMEM;
	work->entry.key = sfr_sys.malloc(len);
	if (!work->entry.key) {
		sfr_sys.free(work);
		return -ENOMEM;
	}
	memcpy(work->entry.key, key, len);
	work->entry.kind = SFR__LOG_WORK;
	work->entry.work = work;
	work->number = atomic_fetch_add_explicit(&nr_works, 1, memory_order_relaxed) + 1;
	work->kind = kind;
	work->fork_generation = sfr_fork_generation();
	atomic_init(&work->refs, 1);
	atomic_init(&work->appended, false);
	*out = work;
	return 0;
}

int sfr_log_work_append(struct sfr_log_work *work)
{
	int rc;

	if (foreign(work))
		return SFR_EFORK;
	rc = sfr__log_start();
	if (rc < 0)
		return rc;
	if (atomic_exchange(&work->appended, true))
		return SFR_ESTATE;
	atomic_fetch_add(&work->refs, 1);
	sfr__log_append(&work->entry);
	return 0;
}

uint64_t sfr_log_work_number(const struct sfr_log_work *work)
{
	return work->number;
}

int sfr_log_work_next(uint64_t slice_ns, uint64_t *number, int *after_good)
{
	bool good = true;
	int rc = sfr__log_take_turn(slice_ns, number, &good);

	*after_good = good;
	return rc;
}

void sfr_log_work_end(struct sfr_log_work *work, int ok)
{
	if (!foreign(work) && atomic_load(&work->appended))
		sfr__log_work_ended(&work->entry, ok != 0);
}

void sfr_log_work_put(struct sfr_log_work *work)
{
	if (!work || foreign(work))
		return; /* the child leaks what is its parent's: one entry, no lock is taken */
	sfr_log_work_end(work, 0);
	drop(work);
}

bool sfr__work_creates(const struct sfr_log_work *work)
{
	return work->kind != SFR_WORK_REMOVE;
}

bool sfr__work_is_save(const struct sfr_log_work *work)
{
	return work->kind == SFR_WORK_SAVE;
}

void sfr__work_left_log(struct sfr_log_work *work)
{
	drop(work);
}
