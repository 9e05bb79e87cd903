/* Small pools: several saves and threads with fewer blocks than any of them needs.
 *
 * A seed chooses layouts, pools, writers and the fates of the saves. A failure prints the seed;
 * CHECK_SEED in the environment repeats it. */
#include <errno.h>
#include <pthread.h>

#include "saving.h"
#include "snapshot/snapshot.h"

enum {
	NR_ROUNDS = 60,
	NR_THREADS = 3,
	NR_SAVES = 4, /* saves of each thread in a round */
	MAX_SOURCES = 7,
	BLOCK = SAVING_BLOCK,
	MAX_LEN = 3 * BLOCK,
};

static const char *dir;
static struct saving_state one;

/* ---- any layout, any pool, several threads ---- */

/* One thread's saves. Their bytes identify the save and the source. */
struct saver {
	struct sfr_engine *engine;
	unsigned number;
	uint64_t random;
	unsigned char bytes[MAX_SOURCES][MAX_LEN];
	int durable, cancelled; /* how many ended this way */
};

/* Draws a length near a boundary: nothing, one byte, about a block. */
static uint64_t draw_len(uint64_t *random)
{
	static const uint64_t lens[] = { 0,         1,     63,        64,        4096,
					 BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, MAX_LEN };
	uint32_t i = check_draw(random, 2 * sizeof(lens) / sizeof(lens[0]));

	return i < sizeof(lens) / sizeof(lens[0]) ? lens[i] : check_draw(random, MAX_LEN);
}

static unsigned char value(unsigned thread, unsigned save, unsigned source, uint64_t at)
{
	return (unsigned char)(thread * 61 + save * 17 + source * 5 + at % 251);
}

/* Returns whether the file holds exactly these sources with this save's bytes. */
static bool holds(const char *name, const struct saver *s, unsigned save,
		  const struct sfr_save_desc *desc)
{
	static _Thread_local unsigned char got[MAX_LEN];
	struct sfr_check *check = NULL;
	struct sfr__image img;
	int fd = open(dir_path(dir, name), O_RDONLY | O_CLOEXEC);
	bool ok = false;

	if (fd < 0)
		return false;
	if (sfr_check_new(fd, SFR_CHECK_BYTES, &check) == 0 &&
	    sfr_check_run(check, SFR_FOREVER) == 0 && sfr_check_result(check)->ok &&
	    sfr_check_result(check)->nr_unchecked == 0 && sfr__image_init(&img, desc, BLOCK) == 0) {
		ok = true;
		for (uint32_t i = 0; i < img.nr_entries; i++) {
			const struct sfr__image_entry *entry = &img.entries[i];

			if (entry->source < 0)
				continue;
			ok = ok && pread(fd, got, entry->nbytes, (off_t)entry->data_off) ==
					   (ssize_t)entry->nbytes;
			for (uint64_t k = 0; ok && k < entry->nbytes; k++)
				ok = got[k] == value(s->number, save, (unsigned)entry->source, k);
		}
		sfr__image_fini(&img);
	}
	sfr_check_free(check);
	(void)close(fd);
	return ok;
}

/* Submits in slices so short that every wait is interrupted. */
static int submit_in_slices(struct sfr_ticket *t)
{
	const uint64_t slice_ns = 100 * 1000;
	int rc;

	do
		rc = sfr_save_admit(t, slice_ns);
	while (rc == SFR_EAGAIN);
	if (rc < 0)
		return rc;
	do
		rc = sfr_save_capture(t, slice_ns);
	while (rc == SFR_EAGAIN);
	return rc < 0 ? rc : sfr_save_launch(t);
}

static void save_one(struct saver *s, unsigned save)
{
	struct sfr_source sources[MAX_SOURCES];
	uint32_t nr_sources = check_draw(&s->random, MAX_SOURCES + 1),
		 fate = check_draw(&s->random, 8);
	struct sfr_report report;
	struct sfr_ticket *t;
	char name[32];

	(void)snprintf(name, sizeof(name), "%u-%u", s->number, save);
	for (uint32_t i = 0; i < nr_sources; i++) {
		uint64_t len = draw_len(&s->random);

		for (uint64_t k = 0; k < len; k++)
			s->bytes[i][k] = value(s->number, save, i, k);
		sources[i] = (struct sfr_source){
			.addr = (uint64_t)(uintptr_t)s->bytes[i],
			.nbytes = len,
			.lane = check_draw(&s->random, 2) ? SFR_CAPTURED : SFR_LANE_HOST,
		};
	}
	const struct sfr_save_desc desc = { .dir = dir,
					    .name = name,
					    .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = sources,
					    .nr_sources = nr_sources };
	if (!CHECK_EQ(sfr_save_new(s->engine, &desc, &t), 0))
		return;
	if (!CHECK_EQ(submit_in_slices(t), 0))
		return;
	if (fate == 0)
		(void)sfr_save_cancel(t); /* the save may have ended already */
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	(void)sfr_save_give_verdict(t, -1);
	if (fate == 1)
		(void)sfr_engine_trim(s->engine);
	if (fate == 2)
		(void)sfr_engine_warm_up(s->engine, 2 * BLOCK);
	/* From here on the sources may change: the next save overwrites them. */
	memset(s->bytes, 0xee, sizeof(s->bytes));
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK(report.peak_pool_bytes <= s->engine->pool_bytes);
	if (report.state == SFR_DURABLE)
		s->durable++;
	if (report.state == SFR_CANCELLED)
		s->cancelled++;
	if (report.state == SFR_DURABLE)
		CHECK(holds(name, s, save, &desc));
	else
		CHECK(fate == 0 && report.state == SFR_CANCELLED);
	sfr_ticket_put(t);
}

static void *saver_main(void *arg)
{
	for (unsigned save = 0; save < NR_SAVES; save++)
		save_one(arg, save);
	return NULL;
}

/* Takes notices until none is left. */
static void drain_notices(int nr_ended)
{
	while (nr_ended > 0)
		nr_ended -= saving_notice() == SFR_NOTICE_ENDED;
}

static void one_round(uint64_t seed, int *durable, int *cancelled)
{
	static struct saver savers[NR_THREADS];
	uint64_t random = seed;
	uint32_t nr_blocks = 1 + check_draw(&random, 3), nr_writers = 1 + check_draw(&random, 3);
	struct sfr_engine *engine =
		saving_engine(nr_blocks, nr_writers, 1 + check_draw(&random, NR_THREADS));
	int failed = check__nr_failed;
	pthread_t threads[NR_THREADS];

	for (unsigned i = 0; i < NR_THREADS; i++) {
		savers[i].engine = engine;
		savers[i].number = i;
		savers[i].random = seed * 1000 + i;
		savers[i].durable = savers[i].cancelled = 0;
		CHECK_EQ(pthread_create(&threads[i], NULL, saver_main, &savers[i]), 0);
	}
	drain_notices(NR_THREADS * NR_SAVES);
	for (unsigned i = 0; i < NR_THREADS; i++) {
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
		*durable += savers[i].durable;
		*cancelled += savers[i].cancelled;
	}
	saving_end(engine);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	if (check__nr_failed != failed)
		(void)fprintf(stderr, "  (CHECK_SEED=%llu: %u blocks, %u writers)\n",
			      (unsigned long long)seed, nr_blocks, nr_writers);
}

TEST(any_layout_is_saved_through_any_small_pool)
{
	uint64_t seed = check_number("CHECK_SEED", 0);
	int durable = 0, cancelled = 0;

	if (seed) {
		one_round(seed, &durable, &cancelled);
		return;
	}
	for (uint64_t i = 1; i <= NR_ROUNDS; i++)
		one_round(i, &durable, &cancelled);
	CHECK(cancelled > 0 && durable > 2 * cancelled);
}

/* ---- reports of waits ---- */

TEST(a_wait_for_blocks_is_in_the_report_and_the_pool_is_never_larger)
{
	struct sfr_engine *engine = saving_engine(1, 1, 2);
	struct sfr_report report;
	struct sfr_stats stats;
	struct sfr_ticket *t;

	saving_slow("pwrite", 2 * 1000 * 1000);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(saving_submit(t), 0); /* 20,000 captured bytes, 8,192 at a time */
	saving_finish(t);
	sfr_inject_clear();
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_DURABLE);
	CHECK(report.captured_nbytes > 2 * BLOCK);
	CHECK(report.block_wait_ns >= 2 * 2 * 1000 * 1000); /* two blocks had to be written first */
	CHECK_EQ(report.peak_pool_bytes, BLOCK);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.committed_bytes, BLOCK);
	CHECK_EQ(stats.leased_bytes, 0);
	sfr_ticket_put(t);
	saving_end(engine);
	CHECK_EQ(saving_content(dir, "a"), 1);
}

/* A signal handler saves while the interrupted save waits for blocks. */
TEST(nested_save_completes_while_the_interrupted_one_waits_for_blocks)
{
	struct sfr_engine *engine = saving_engine(1, 1, 1);
	struct sfr_ticket *outer, *nested;

	saving_slow("pwrite", 5 * 1000 * 1000);
	CHECK_EQ(saving_new(engine, dir, "outer", &one, 0, &outer), 0);
	CHECK_EQ(sfr_save_admit(outer, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_capture(outer, 0), SFR_EAGAIN); /* one of its blocks is with the writer */
	nested = saving_started(engine, dir, "nested", &one, SFR_SAVE_NESTED);
	CHECK_EQ(sfr_save_wait(nested, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(nested, -1), 0);
	CHECK_EQ(sfr_save_wait(nested, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(saving_content(dir, "nested"), 1);
	CHECK_EQ(sfr_save_capture(outer, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(outer), 0);
	CHECK_EQ(sfr_save_wait(outer, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(outer, -1), 0);
	CHECK_EQ(sfr_save_wait(outer, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	sfr_inject_clear();
	CHECK_EQ(saving_content(dir, "outer"), 1);
	drain_notices(2);
	sfr_ticket_put(outer);
	sfr_ticket_put(nested);
	saving_end(engine);
}

/* External work at the head of the log may need a snapshot before it ends, and later saves
 * wait for that work. When all their blocks are written, they leave the whole pool to the
 * snapshot. */
TEST(save_that_waits_in_the_log_leaves_the_last_block_to_a_snapshot)
{
	struct sfr_engine *engine = saving_engine(1, 1, 1);
	const struct sfr_source source = { .nbytes = BLOCK };
	char key[PATH_MAX];
	struct sfr_snapshot *snapshot;
	struct sfr_external_work *work;
	struct sfr_ticket *t;

	(void)snprintf(key, sizeof(key), "%s/elsewhere", dir);
	CHECK_EQ(sfr_external_work_new(key, SFR_WORK_SAVE, &work), 0);
	CHECK_EQ(sfr_external_work_append(work), 0);
	t = saving_started(engine, dir, "behind", &one, 0);
	CHECK_EQ(sfr_snapshot_new(engine, &source, 1, 0, &snapshot), 0);
	CHECK_EQ(sfr_snapshot_lease(snapshot, UINT64_C(20000000000)), 0);
	sfr_snapshot_remove_view(snapshot);
	sfr_snapshot_put(snapshot);
	sfr_external_work_mark_ended(work, 1);
	sfr_external_work_put(work);
	saving_done(t);
	saving_end(engine);
	CHECK_EQ(saving_content(dir, "behind"), 1);
}

/* ---- the end of a save ---- */

/* Jobs hold no reference. A writer that has reported its block and has not taken the lock again
 * is counted as a running job, which delays the save's end. */
TEST(save_does_not_end_before_its_last_writer_has_left)
{
	struct sfr_engine *engine = saving_engine(8, 2, 2);
	struct sfr_report report;
	struct sfr_ticket *t = saving_started(engine, dir, "a", &one, 0);

	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	sfr__lock(&engine->mu);
	t->work.nr_jobs++; /* this thread acts as the writer */
	sfr__unlock(&engine->mu);
	CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
	while (t->facts.written_nbytes < t->plan.img.len)
		;
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, 20 * 1000 * 1000), SFR_EAGAIN);
	sfr__lock(&engine->mu);
	t->work.nr_jobs--;
	sfr__ticket_advance_state_locked(t);
	sfr__unlock(&engine->mu);
	saving_finish(t);
	/* The report needs none of this memory. */
	CHECK(!t->plan.jobs && !t->staging.samples.items && !t->plan.img.entries);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK(report.nbytes && report.captured_nbytes && report.deferred_nbytes);
	sfr_ticket_put(t);
	saving_end(engine);
}

/* Uses a pool while another thread closes the engine. */
static void *use_the_pool(void *engine)
{
	int rc;

	do {
		rc = sfr_engine_warm_up(engine, 8 * SAVING_BLOCK);
		if (rc == 0)
			rc = sfr_engine_trim(engine);
	} while (rc == 0);
	return (void *)(intptr_t)rc;
}

TEST(close_waits_for_warm_up_and_trim)
{
	for (int i = 0; i < 20; i++) {
		struct sfr_engine *engine = saving_engine(8, 1, 1);
		struct sfr_stats stats;
		pthread_t user;
		void *rc;

		saving_slow("mmap", 100 * 1000);
		saving_slow("madvise", 100 * 1000);
		CHECK_EQ(pthread_create(&user, NULL, use_the_pool, engine), 0);
		do
			CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
		while (stats.committed_bytes == 0);
		CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
		CHECK_EQ(pthread_join(user, &rc), 0);
		CHECK_EQ((intptr_t)rc, SFR_ECLOSED);
		sfr_inject_clear();
		saving_end(engine);
	}
}

static void stop_log(void)
{
	CHECK_EQ(sfr_log_stop(), 0);
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&one, 1);
	CHECK_EQ(sfr_inject_install(), 0);
	sfr__host_tune(4096, 8192); /* so that copiers help with small copies too */
	check_at_end(stop_log);
	return true;
}
