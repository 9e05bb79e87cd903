/* Saves of parts whose blocks, tails or renames have to wait: for a source that another writer
 * sums, for a file that another writer opens, for a free writer, or for memory. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "parts_list.h"

/* ---- a block that is parked before its source is summed ---- */

static struct sfr_ticket *watched;
static atomic_bool held_once;

static void wait_for_parked_block(void)
{
	bool parked = false;

	while (!parked) {
		(void)usleep(1000);
		parked = sfr__under(&watched->engine->mu, watched->work.parked != NULL);
	}
}

static uint32_t copy_after_parking(uint32_t crc, void *dst, const void *src, size_t len)
{
	if (!atomic_exchange(&held_once, true))
		wait_for_parked_block();
	return sfr_crc32_copy(crc, dst, src, len);
}

/* A read of the guarded page waits. The source's CRC is computed in place. */
static void read_after_parking(int signal)
{
	(void)signal;
	wait_for_parked_block();
	(void)mprotect(memory, SFR_PAGE, PROT_READ | PROT_WRITE);
}

static void save_watched(struct sfr_engine *engine, struct list *l)
{
	held_once = false;
	CHECK_EQ(new_save(engine, l->parts, 0, &watched), 0);
	sfr_parts_free(l->parts);
	CHECK_EQ(saving_submit(watched), 0);
	saving_finish(watched);
	CHECK_EQ(saving_state_of(watched), SFR_DURABLE);
	sfr_ticket_put(watched);
	check_file(l);
}

/* Its own sources are copied and summed only once, and its memory does not change. */
TEST(parked_block_is_copied_and_summed_once)
{
	struct sfr_engine *engine;
	struct sfr_sys plain = sfr_sys;

	sfr_sys.lane_copy = copy_after_parking;
	engine = saving_engine_of(4096, 8, 2, 2);
	for (unsigned nr_blocks = 1; nr_blocks <= 3; nr_blocks++) {
		struct list l = { 0 };

		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_source(&l, memory + 1, nr_blocks * 4096 + 100);
		add_crc(&l, 0);
		add_source(&l, memory + 5, 200);
		add_crc(&l, 1);
		save_watched(engine, &l);
	}
	saving_end(engine);
	sfr_sys = plain;
}

TEST(parked_crc_field_is_written_when_its_in_place_source_is_summed)
{
	const struct sigaction waits = { .sa_handler = read_after_parking };
	struct sfr_engine *engine = saving_engine_of(MEMORY, 2, 2, 2);
	struct sigaction before;
	struct list l = { 0 };

	CHECK_EQ(sfr_parts_new(&l.parts), 0);
	add_source(&l, memory, MEMORY);
	add_crc(&l, 0);
	CHECK_EQ(sigaction(SIGSEGV, &waits, &before), 0);
	CHECK_EQ(mprotect(memory, SFR_PAGE, PROT_NONE), 0);
	save_watched(engine, &l);
	CHECK_EQ(sigaction(SIGSEGV, &before, NULL), 0);
	saving_end(engine);
}

/* ---- calls that stop ---- */

static struct {
	pthread_mutex_t mu;
	pthread_cond_t cv;
	bool closed, used;
} gates[2] = { { .mu = PTHREAD_MUTEX_INITIALIZER, .cv = PTHREAD_COND_INITIALIZER },
	       { .mu = PTHREAD_MUTEX_INITIALIZER, .cv = PTHREAD_COND_INITIALIZER } };
enum { SYNCS, WRITES };

static struct sfr_sys real;

static void pass(unsigned which)
{
	(void)pthread_mutex_lock(&gates[which].mu);
	gates[which].used = true;
	(void)pthread_cond_broadcast(&gates[which].cv);
	while (gates[which].closed)
		(void)pthread_cond_wait(&gates[which].cv, &gates[which].mu);
	(void)pthread_mutex_unlock(&gates[which].mu);
}

static void set_gate(unsigned which, bool closed)
{
	(void)pthread_mutex_lock(&gates[which].mu);
	gates[which].closed = closed;
	gates[which].used = false;
	(void)pthread_cond_broadcast(&gates[which].cv);
	(void)pthread_mutex_unlock(&gates[which].mu);
}

static void wait_until_used(unsigned which)
{
	(void)pthread_mutex_lock(&gates[which].mu);
	while (!gates[which].used)
		(void)pthread_cond_wait(&gates[which].cv, &gates[which].mu);
	(void)pthread_mutex_unlock(&gates[which].mu);
}

static int passing_fdatasync(int fd)
{
	pass(SYNCS);
	return real.fdatasync(fd);
}

static ssize_t passing_pwrite(int fd, const void *buf, size_t len, off_t off)
{
	pass(WRITES);
	return real.pwrite(fd, buf, len, off);
}

static void submit_few_bytes(struct sfr_engine *engine, struct sfr_ticket **t)
{
	struct list l = { 0 };

	CHECK_EQ(sfr_parts_new(&l.parts), 0);
	add_bytes(&l, memory, 10);
	CHECK_EQ(new_save(engine, l.parts, SFR_SAVE_UNORDERED | SFR_SAVE_DURABLE, t), 0);
	sfr_parts_free(l.parts);
	CHECK_EQ(saving_submit(*t), 0);
}

/* Everything is written and synced, and the only writer works for another save. */
TEST(a_save_that_waits_to_be_renamed_can_be_cancelled)
{
	struct sfr_engine *engine;
	struct sfr_ticket *first, *second;

	real = sfr_sys;
	sfr_sys.fdatasync = passing_fdatasync;
	sfr_sys.pwrite = passing_pwrite;
	engine = saving_engine_of(4096, 4, 1, 2);
	set_gate(SYNCS, true);
	submit_few_bytes(engine, &first);
	wait_until_used(SYNCS);
	set_gate(WRITES, true);
	submit_few_bytes(engine, &second);
	set_gate(SYNCS, false);
	wait_until_used(WRITES);
	CHECK_EQ(saving_state_of(first), SFR_READY);
	CHECK_EQ(sfr_save_cancel(first), 1);
	set_gate(WRITES, false);
	CHECK_EQ(sfr_save_wait(first, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(saving_state_of(first), SFR_CANCELLED);
	CHECK_EQ(sfr_save_wait(second, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(saving_state_of(second), SFR_DURABLE);
	for (unsigned nr = 0; nr < 2;)
		if (saving_notice() == SFR_NOTICE_ENDED)
			nr++;
	sfr_ticket_put(first);
	sfr_ticket_put(second);
	saving_end(engine);
	sfr_sys = real;
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

/* The second writer gets the TAIL job while the first one is opening the file. */
static atomic_bool opening;

static bool is_end_taken(void)
{
	struct sfr_engine *engine = watched->engine;

	return sfr__under(&engine->mu, watched->facts.tail_queued && !engine->tasks.head);
}

static int open_after_end_is_taken(int at, const char *name, int flags, mode_t mode)
{
	if ((flags & O_CREAT) && atomic_exchange(&opening, false)) {
		while (!is_end_taken())
			(void)usleep(1000);
		/* by now the second one has the job, or the test shows nothing */
		(void)usleep(20000);
	}
	return real.open(at, name, flags, mode);
}

TEST(an_empty_file_is_synced_once_it_is_open)
{
	struct sfr_engine *engine;
	struct list l = { 0 };

	real = sfr_sys;
	sfr_sys.open = open_after_end_is_taken;
	engine = saving_engine_of(4096, 4, 2, 2);
	CHECK_EQ(sfr_parts_new(&l.parts), 0);
	CHECK_EQ(new_save(engine, l.parts, SFR_SAVE_DURABLE, &watched), 0);
	sfr_parts_free(l.parts);
	opening = true;
	CHECK_EQ(saving_submit(watched), 0);
	saving_finish(watched);
	CHECK_EQ(saving_state_of(watched), SFR_DURABLE);
	sfr_ticket_put(watched);
	check_file(&l);
	saving_end(engine);
	sfr_sys = real;
}

/* The field is in the block for which there is no buffer. */
TEST(save_fails_without_memory_for_a_buffer)
{
	const struct sfr_fault none = {
		.call = "mmap", .nth = 1, .sticky = 1, .err = ENOMEM, .limit = -1
	};
	struct sfr_engine *engine;
	struct sfr_report report;
	struct sfr__block *held;
	struct sfr_ticket *t;
	struct list l = { 0 };

	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine_of(64 * KIB, 1, 1, 1);
	CHECK_EQ(sfr__pool_get(engine->pool, 0, 64 * KIB, 0, &held), 0);
	CHECK_EQ(sfr_parts_new(&l.parts), 0);
	add_source(&l, memory + 1, 100);
	add_crc(&l, 0);
	CHECK_EQ(new_save(engine, l.parts, 0, &t), 0);
	sfr_parts_free(l.parts);
	CHECK_EQ(sfr_inject_add_fault(&none), 0);
	CHECK_EQ(saving_submit(t), 0);
	saving_finish(t);
	sfr_inject_clear();
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.err.code, -ENOMEM);
	CHECK(strcmp(report.err.note, "no memory for a buffer") == 0);
	sfr_ticket_put(t);
	sfr__pool_put(engine->pool, held);
	saving_end(engine);
	sfr_inject_uninstall();
}

BEGIN
{
	if (!list_begin())
		exit(EXIT_FAILURE);
	return true;
}
