/* parts.c and in_place.c: a file made of parts has exactly the bytes of the parts in their
 * order, for any blocks, any pool, and any failure. */
#include <errno.h>
#include <sys/mman.h>

#include "parts_list.h"

static uint64_t below(uint64_t bound)
{
	return check_random() % bound;
}

static void add_random(struct list *l, unsigned nr, uint64_t most)
{
	for (unsigned i = 0; i < nr && l->len + 2 * most < FILE_MAX; i++) {
		uint64_t len = below(3) == 0 ? below(64) : below(most);
		const unsigned char *at = memory + below(MEMORY - len);

		switch (below(4)) {
		case 0:
			add_bytes(l, at, len % 5000);
			break;
		case 1:
			add_source(l, at, len);
			break;
		case 2:
			align(l, at);
			add_source(l, at, len);
			break;
		default:
			if (l->nr_sources)
				add_crc(l, (uint32_t)below(l->nr_sources));
		}
	}
}

/* ---- the tests ---- */

TEST(file_has_its_parts_in_order)
{
	static const uint64_t blocks[] = { 4096, 8192, 64 * KIB, MIB };

	for (unsigned round = 0; round < 12; round++) {
		struct sfr_engine *engine =
			saving_engine_of(blocks[round % 4], 1 + round % 3, 1 + round % 2, 2);
		struct list l = { 0 };

		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_random(&l, (unsigned)below(120), round < 8 ? 9000 : 2 * MIB);
		CHECK_EQ(l.rc, 0);
		CHECK_EQ(sfr_parts_file_len(l.parts), l.len);
		CHECK_EQ(save(engine, &l,
			      (round % 2 ? SFR_SAVE_DURABLE : 0) |
				      (round / 2 % 2 ? SFR_SAVE_UNORDERED : 0)),
			 0);
		check_file(&l);
		saving_end(engine);
	}
}

/* External work at the head of the log waits for it, and the saves after that work have all
 * slots. */
TEST(an_unordered_save_waits_for_nothing_in_the_log)
{
	struct sfr_engine *engine = saving_engine_of(4096, 8, 2, 2);
	struct sfr_ticket *behind[2], *t[2];
	struct sfr_external_work *work;
	struct list l = { 0 };

	CHECK_EQ(sfr_external_work_new("/in front", SFR_WORK_SAVE, &work), 0);
	CHECK_EQ(sfr_external_work_append(work), 0);
	for (unsigned i = 0; i < 4; i++) {
		const uint32_t flags = i < 2 ? 0 : SFR_SAVE_UNORDERED;

		l = (struct list){ 0 };
		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_bytes(&l, memory, i + 1);
		CHECK_EQ(new_save(engine, l.parts, flags, i < 2 ? &behind[i] : &t[i - 2]), 0);
		sfr_parts_free(l.parts);
		CHECK_EQ(saving_submit(i < 2 ? behind[i] : t[i - 2]), 0);
	}
	for (unsigned i = 0; i < 2; i++) {
		saving_finish(t[i]);
		CHECK_EQ(sfr_save_wait(behind[i], SFR_WAIT_ENDED, 0), SFR_EAGAIN);
		CHECK_EQ(saving_state_of(t[i]), SFR_DURABLE);
		sfr_ticket_put(t[i]);
	}
	CHECK_EQ(sfr_log_pending(), 3);
	sfr_external_work_mark_ended(work, 1);
	for (unsigned i = 0; i < 2; i++) {
		saving_finish(behind[i]);
		sfr_ticket_put(behind[i]);
	}
	sfr_external_work_put(work);
	saving_end(engine);
}

/* The bound does not depend on max_in_flight. */
TEST(number_of_unordered_saves_is_bounded)
{
	enum { MOST = SFR__MAX_UNORDERED };
	struct sfr_fault slow = {
		.call = "pwrite", .nth = 1, .sticky = 1, .limit = -1, .delay_ns = 20000000
	};
	static struct sfr_ticket *t[MOST + 1];
	struct sfr_engine *engine;

	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine_of(4096, 8, 2, 2);
	CHECK_EQ(sfr_inject_add_fault(&slow), 0);
	for (unsigned i = 0; i <= MOST; i++) {
		const bool last = i == MOST;
		struct list l = { 0 };

		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_source(&l, memory + 1, 3 * 4096);
		CHECK_EQ(new_save(engine, l.parts,
				  SFR_SAVE_UNORDERED | (last ? SFR_SAVE_NO_WAIT : 0), &t[i]),
			 0);
		sfr_parts_free(l.parts);
		CHECK_EQ(sfr_save_admit(t[i], last ? 0 : SFR_FOREVER), last ? SFR_EBUSY : 0);
	}
	CHECK_EQ(sfr_save_capture(t[0], SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(t[0]), 0);
	CHECK_EQ(sfr_save_cancel(t[0]), 1);
	sfr_inject_clear();
	for (unsigned i = 0; i <= MOST; i++) {
		if (i > 0)
			sfr_save_abandon(t[i]); /* does nothing to the last one */
		if (i < MOST) {
			saving_finish(t[i]);
			CHECK_EQ(saving_state_of(t[i]), SFR_CANCELLED);
		}
		sfr_ticket_put(t[i]);
	}
	CHECK_EQ(sfr_log_pending(), 0);
	saving_end(engine);
	sfr_inject_uninstall();
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

/* A field for a source of many blocks, at every offset around the end of a block. */
TEST(a_crc_field_may_cross_two_blocks)
{
	struct sfr_engine *engine = saving_engine_of(4096, 2, 2, 2);

	for (unsigned off = 4090; off <= 4097; off++) {
		struct list l = { 0 };

		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_source(&l, memory + 1, 3 * 4096);
		add_bytes(&l, memory, off);
		add_crc(&l, 0);
		add_bytes(&l, memory, 17);
		CHECK_EQ(save(engine, &l, 0), 0);
		check_file(&l);
	}
	saving_end(engine);
}

/* One writer is slow with the source. The other one has the field before the source is summed. */
TEST(a_crc_field_waits_for_its_source)
{
	struct sfr_fault slow = {
		.call = "lane_copy", .nth = 1, .limit = -1, .delay_ns = 20000000
	};
	struct sfr_engine *engine;

	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine_of(4096, 8, 2, 2);
	for (unsigned nr_blocks = 1; nr_blocks <= 3; nr_blocks++) {
		struct list l = { 0 };

		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_source(&l, memory + 1, nr_blocks * 4096);
		add_crc(&l, 0);
		sfr_inject_clear();
		CHECK_EQ(sfr_inject_add_fault(&slow), 0);
		CHECK_EQ(save(engine, &l, 0), 0);
		check_file(&l);
	}
	saving_end(engine);
	sfr_inject_uninstall();
}

/* The CRC of four megabytes takes longer than writing the field after them would. */
TEST(a_crc_field_waits_for_a_source_written_in_place)
{
	struct sfr_engine *engine = saving_engine_of(MEMORY, 2, 2, 2);

	for (unsigned round = 0; round < 8; round++) {
		struct list l = { 0 };

		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_source(&l, memory, MEMORY);
		add_crc(&l, 0);
		CHECK_EQ(save(engine, &l, 0), 0);
		check_file(&l);
	}
	saving_end(engine);
}

static uint64_t nr_copied;

static uint32_t counting_copy(uint32_t crc, void *dst, const void *src, size_t len)
{
	(void)__atomic_add_fetch(&nr_copied, len, __ATOMIC_RELAXED);
	return sfr_crc32_copy(crc, dst, src, len);
}

TEST(equally_aligned_sources_are_not_copied)
{
	struct sfr_sys plain = sfr_sys;

	for (unsigned shift = 0; shift < 2; shift++) {
		struct sfr_engine *engine;
		struct list l = { 0 };

		sfr_sys.lane_copy = counting_copy; /* while no thread of the core runs */
		nr_copied = 0;
		engine = saving_engine_of(MIB, 2, 2, 2);
		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_bytes(&l, memory, 100);
		align(&l, memory + 200);
		add_bytes(&l, memory, shift); /* the second time the alignment differs */
		add_source(&l, memory + 200, 3 * MIB);
		add_crc(&l, 0);
		CHECK_EQ(save(engine, &l, 0), 0);
		check_file(&l);
		/* Only the bytes before and after its whole pages are copied. */
		CHECK_EQ(nr_copied, shift ? 3 * MIB : SFR_PAGE);
		saving_end(engine);
		sfr_sys = plain;
	}
}

static uint64_t nr_maps, nr_unmaps, longest_map;

static void *counting_mmap(void *at, size_t len, int prot, int flags, int fd, off_t off)
{
	(void)__atomic_add_fetch(&nr_maps, 1, __ATOMIC_RELAXED);
	if (len > __atomic_load_n(&longest_map, __ATOMIC_RELAXED))
		__atomic_store_n(&longest_map, len, __ATOMIC_RELAXED);
	return mmap(at, len, prot, flags, fd, off);
}

static int counting_munmap(void *at, size_t len)
{
	(void)__atomic_add_fetch(&nr_unmaps, 1, __ATOMIC_RELAXED);
	return munmap(at, len);
}

/* Buffers are small even if the pool's blocks are long, because they take memory besides a
 * snapshot that may fill the pool. */
TEST(buffers_for_a_full_pool_are_small_and_returned)
{
	struct sfr_engine *engine = saving_engine_of(8 * MIB, 1, 1, 1);
	struct sfr_sys plain = sfr_sys;
	struct sfr__block *held;
	struct list l = { 0 };

	CHECK_EQ(sfr__pool_get(engine->pool, 0, 8 * MIB, 0, &held), 0);
	sfr_sys.mmap = counting_mmap;
	sfr_sys.munmap = counting_munmap;
	CHECK_EQ(sfr_parts_new(&l.parts), 0);
	for (unsigned i = 0; i < 3; i++)
		add_source(&l, memory + 1, MEMORY - 1);
	CHECK_EQ(save(engine, &l, 0), 0);
	check_file(&l);
	CHECK(nr_maps >= 3 && longest_map == 4 * MIB);
	CHECK_EQ(nr_unmaps, nr_maps);
	sfr__pool_put(engine->pool, held);
	saving_end(engine);
	sfr_sys = plain;
}

TEST(few_buffers_are_enough_for_any_length)
{
	struct sfr_engine *engine = saving_engine_of(64 * KIB, 64, 2, 2);
	struct sfr_report report;
	struct sfr_ticket *t = NULL;
	struct list l = { 0 };

	CHECK_EQ(sfr_parts_new(&l.parts), 0);
	for (unsigned i = 0; i < 5; i++) {
		add_source(&l, memory + 1, 3 * MIB + i);
		add_crc(&l, i);
	}
	CHECK_EQ(new_save(engine, l.parts, 0, &t), 0);
	sfr_parts_free(l.parts);
	CHECK_EQ(saving_submit(t), 0);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK(report.peak_pool_bytes > 0 && report.peak_pool_bytes <= 4 * 64 * KIB);
	CHECK_EQ(report.captured_nbytes, 0);
	sfr_ticket_put(t);
	check_file(&l);
	saving_end(engine);
}

TEST(sources_of_parts_count_as_copied_only_when_written)
{
	struct sfr_fault slow = {
		.call = "pwrite", .nth = 1, .sticky = 1, .limit = -1, .delay_ns = 2000000
	};
	struct sfr_engine *engine;

	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine_of(64 * KIB, 2, 2, 2);
	for (unsigned cancel = 0; cancel < 2; cancel++) {
		struct sfr_ticket *t = NULL;
		struct list l = { 0 };

		CHECK_EQ(sfr_inject_add_fault(&slow), 0);
		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		add_source(&l, memory + 1, 3 * MIB);
		CHECK_EQ(new_save(engine, l.parts, 0, &t), 0);
		sfr_parts_free(l.parts);
		CHECK_EQ(saving_submit(t), 0);
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 0), SFR_EAGAIN);
		if (cancel)
			CHECK_EQ(sfr_save_cancel(t), 1);
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
		if (cancel)
			CHECK_EQ(saving_state_of(t), SFR_CANCELLED);
		else
			CHECK_EQ(t->facts.written_nbytes, 3 * MIB);
		sfr_inject_clear();
		saving_done(t);
	}
	saving_end(engine);
	sfr_inject_uninstall();
}

TEST(any_failing_call_leaves_old_or_complete_new_file_of_parts)
{
	static const struct {
		const char *call;
		int err;
	} faults[] = { { "*", ENOMEM }, { "*", EIO }, { "pwrite", ENOSPC } };

	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		FOR_EVERY_FAILURE(run, faults[i].call, faults[i].err)
		{
			const struct sfr_engine_opts opts = { .pool_bytes = 8192,
							      .block_bytes = 4096,
							      .nr_writers = 1,
							      .max_in_flight = 1 };
			struct sfr_engine *engine = NULL;
			struct list l = { 0 };
			int rc = sfr_engine_new(&opts, &engine);

			l.rc = rc ? rc : sfr_parts_new(&l.parts);
			if (l.rc == 0) {
				align(&l, memory);
				add_source(&l, memory, 4 * 4096 + 5);
				add_crc(&l, 0);
				add_bytes(&l, "end", 3);
				CHECK(l.rc == 0 || check_acted(&run));
				rc = save(engine, &l, i == 0 ? SFR_SAVE_UNORDERED : 0);
				CHECK(l.rc == 0 || rc == l.rc); /* the first failure is kept */
			} else {
				rc = l.rc;
			}
			CHECK(rc == 0 || check_acted(&run));
			check_end_fault(&run);
			if (rc == 0)
				check_file(&l);
			if (engine)
				saving_end(engine);
		}
		CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	}
}

TEST(save_owns_its_parts)
{
	struct sfr_engine *engine = saving_engine_of(4096, 2, 1, 2);
	struct sfr_ticket *t = NULL, *again = NULL;
	struct list l = { 0 };

	CHECK_EQ(sfr_parts_new(&l.parts), 0);
	add_source(&l, memory + 1, 5000);
	CHECK_EQ(new_save(engine, l.parts, 0, &t), 0);
	CHECK_EQ(new_save(engine, l.parts, 0, &again), -EINVAL);
	CHECK(again == NULL);
	CHECK_EQ(sfr_parts_add_bytes(l.parts, "x", 1), -EINVAL);
	sfr_parts_free(l.parts);
	CHECK_EQ(saving_submit(t), 0);
	saving_done(t);
	check_file(&l);
	saving_end(engine);
}

TEST(invalid_parts_are_refused_for_good)
{
	const int64_t one[65] = { 1 };
	const struct sfr_tensor tensor = {
		.storage = "FloatStorage", .ndim = 65, .sizes = one, .strides = one
	};
	struct sfr_engine *engine = saving_engine_of(4096, 2, 1, 2);
	struct sfr_ticket *t = NULL;

	for (unsigned kind = 0; kind < 4; kind++) {
		struct sfr_parts *parts;
		int rc = 0;

		CHECK_EQ(sfr_parts_new(&parts), 0);
		if (kind == 0)
			rc = sfr_parts_add_crc(parts, 0);
		if (kind == 1)
			rc = sfr_parts_add_source(parts, 0, 1);
		if (kind == 2)
			rc = sfr_parts_add_tensor(parts, &tensor);
		if (kind == 3)
			rc = sfr_parts_add_source(parts, 1, UINT64_C(1) << 63);
		CHECK_EQ(rc, kind == 3 ? -EFBIG : -EINVAL);
		CHECK_EQ(sfr_parts_add_bytes(parts, "x", 1), rc);
		CHECK_EQ(sfr_parts_add_tensor(parts, &tensor), rc);
		CHECK_EQ(new_save(engine, parts, 0, &t), rc);
		CHECK(t == NULL);
		sfr_parts_free(parts);
	}
	saving_end(engine);
}

BEGIN
{
	if (!list_begin())
		exit(EXIT_FAILURE);
	return true;
}
