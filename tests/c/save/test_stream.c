/* Streams: saves whose bytes a caller takes in the order of the file (save/stream.c), whatever the
 * format, the pool, the devices, the order in which pieces come back, and what fails. */
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>

#include "cuda/fake.h"
#include "flat_state.h"
#include "parts_list.h"

#define PATIENCE_NS UINT64_C(20000000000) /* a wait that takes longer hangs */

static struct flat_state flat;
static struct saving_state torch;

static int flat_stream(struct sfr_engine *engine, uint32_t flags, struct sfr_ticket **t)
{
	struct sfr_save_desc desc = flat.desc;

	desc.dir = dir;
	desc.name = "a";
	desc.flags = flags | SFR_SAVE_STREAM;
	return sfr_save_new(engine, &desc, t);
}

static struct sfr_ticket *torch_stream(struct sfr_engine *engine, uint32_t flags)
{
	struct sfr_ticket *t = NULL;

	CHECK_EQ(saving_new(engine, dir, "a", &torch, flags | SFR_SAVE_STREAM, &t), 0);
	return t;
}

static void check_all_is_back(struct sfr_engine *engine)
{
	struct sfr_stats stats;

	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.leased_bytes, 0);
	CHECK_EQ(stats.save_bytes, 0);
}

/* ---- a thread that takes pieces, and some that give them back in any order ---- */

enum { MOST_HELD = 40, NR_GIVERS = 3 };

static struct {
	pthread_mutex_t mu;
	pthread_cond_t cv;
	struct sfr_file_piece pieces[MOST_HELD];
	unsigned nr, permits; /* pieces; how many of them may be given back */
	bool over;            /* no more will come */

	/* of the thread that takes */
	struct sfr_ticket *t;
	pthread_t taker, givers[NR_GIVERS];
	uint64_t len; /* bytes in `got` */
	int rc;
} bag = { .mu = PTHREAD_MUTEX_INITIALIZER, .cv = PTHREAD_COND_INITIALIZER };

static void *give_main(void *unused)
{
	uint64_t random = (uintptr_t)unused;

	(void)pthread_mutex_lock(&bag.mu);
	while (!bag.over || bag.nr != 0) {
		struct sfr_file_piece piece;
		unsigned i;

		if (bag.nr == 0 || (bag.permits == 0 && !bag.over)) {
			(void)pthread_cond_wait(&bag.cv, &bag.mu);
			continue;
		}
		random = random * UINT64_C(6364136223846793005) + 1;
		i = (unsigned)(random >> 33) % bag.nr;
		piece = bag.pieces[i];
		bag.pieces[i] = bag.pieces[--bag.nr];
		bag.permits -= bag.permits != 0;
		(void)pthread_mutex_unlock(&bag.mu);
		sfr_stream_give_back(bag.t, &piece);
		CHECK(piece.owner == NULL);
		(void)pthread_mutex_lock(&bag.mu);
	}
	(void)pthread_mutex_unlock(&bag.mu);
	return NULL;
}

static void permit(unsigned nr)
{
	(void)pthread_mutex_lock(&bag.mu);
	bag.permits = nr;
	(void)pthread_cond_broadcast(&bag.cv);
	(void)pthread_mutex_unlock(&bag.mu);
}

static void put_into_bag(struct sfr_file_piece *piece)
{
	bool full;

	(void)pthread_mutex_lock(&bag.mu);
	full = bag.nr == MOST_HELD;
	if (!full)
		bag.pieces[bag.nr++] = *piece;
	(void)pthread_mutex_unlock(&bag.mu);
	if (full)
		sfr_stream_give_back(bag.t, piece);
}

/* Checks that the blocks that were leased are the first of the file. */
static void check_leases(struct sfr_ticket *t)
{
	sfr__lock(&t->engine->mu);
	for (uint32_t i = t->work.blocks_leased; t->plan.jobs && i < t->plan.nr_blocks; i++)
		CHECK(t->plan.jobs[i].block == NULL);
	sfr__unlock(&t->engine->mu);
}

static void *take_main(void *unused)
{
	uint64_t random = 1;
	struct sfr_file_piece piece;
	int rc;

	(void)unused;
	do {
		rc = sfr_stream_take_next_piece(bag.t, 0, &piece);
		if (rc == SFR_EAGAIN) { /* everything may be with us */
			permit(MOST_HELD);
			rc = sfr_stream_take_next_piece(bag.t, PATIENCE_NS, &piece);
		}
		if (rc < 0)
			break;
		CHECK_EQ(piece.off, bag.len);
		if (!bag.t->plan.in_place)
			check_leases(bag.t);
		if (piece.len != 0)
			memcpy(got + bag.len, piece.mem, piece.len);
		bag.len += piece.len;
		put_into_bag(&piece);
		random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
		permit((unsigned)(random >> 33) % 3);
	} while (piece.len != 0);
	bag.rc = rc;
	if (rc == SFR_EAGAIN) /* it hangs; let the test end */
		(void)sfr_save_cancel(bag.t);
	(void)pthread_mutex_lock(&bag.mu);
	bag.over = true;
	(void)pthread_cond_broadcast(&bag.cv);
	(void)pthread_mutex_unlock(&bag.mu);
	return NULL;
}

/* Begins to take the pieces of an admitted save. */
static void begin_to_take(struct sfr_ticket *t)
{
	bag.t = t;
	bag.nr = bag.permits = 0;
	bag.over = false;
	bag.len = 0;
	CHECK_EQ(pthread_create(&bag.taker, NULL, take_main, NULL), 0);
	for (uintptr_t i = 0; i < NR_GIVERS; i++)
		CHECK_EQ(pthread_create(&bag.givers[i], NULL, give_main, (void *)(i + 1)), 0);
}

/* Waits for the end. Returns the code with which the stream has ended. */
static int end_of_taking(void)
{
	CHECK_EQ(pthread_join(bag.taker, NULL), 0);
	for (unsigned i = 0; i < NR_GIVERS; i++)
		CHECK_EQ(pthread_join(bag.givers[i], NULL), 0);
	return bag.rc;
}

/* Makes a new save from its beginning to its end, while those threads take its bytes, and drops
 * it. Returns its code. */
static int stream_save(struct sfr_ticket *t)
{
	const struct sfr_device_stream streams[] = { { .device = 0 },
						     { .device = 1 },
						     { .device = 2 } };
	struct sfr_report report;
	int rc = sfr_save_begin_transfers(t, streams, 3);

	if (rc == 0)
		rc = sfr_save_admit(t, SFR_FOREVER);
	if (rc == 0) {
		begin_to_take(t);
		CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_launch(t), 0);
		CHECK_EQ(fake_gate(t, NULL), 0);
		rc = saving_end_of(t);
		CHECK_EQ(end_of_taking(), rc == 0 ? 0 : SFR_ESTATE);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		if (rc == 0) {
			CHECK_EQ(bag.len, report.nbytes);
			CHECK_EQ(t->facts.written_nbytes, report.nbytes);
		}
		check_all_is_back(t->engine);
	}
	sfr_ticket_put(t);
	return rc;
}

static void check_got(const void *bytes, uint64_t len)
{
	CHECK_EQ(bag.len, len);
	CHECK(bag.len == len && memcmp(got, bytes, len) == 0);
}

/* ---- the bytes are those of the file ---- */

/* Draws the lanes, and for each source the host or one of the devices. */
static void draw_torch(unsigned char value, uint32_t nr_devices)
{
	saving_fill(&torch, value);
	for (uint32_t i = 0; i < SAVING_NR; i++) {
		uint32_t device = (uint32_t)flat_below(nr_devices + 1);

		torch.sources[i].lane = flat_below(2) ? SFR_LANE_HOST : SFR_CAPTURED;
		torch.sources[i].nbytes -= flat_below(4) ? 0 : flat_below(SAVING_LEN / 2);
		if (device != 0)
			fake_put_on_device(&torch, i, i + 1, device - 1);
	}
}

static void check_torch_rounds(unsigned nr_rounds, uint32_t nr_devices)
{
	for (unsigned round = 0; round < nr_rounds && check__nr_failed == 0; round++) {
		struct sfr_engine *engine;

		fake.fake_cuda_reset();
		engine = saving_engine(1 + round % 3, 1 + round % 4 / 2, 2);
		draw_torch((unsigned char)(round + 1), nr_devices);
		saving_poison(engine);
		CHECK_EQ(stream_save(torch_stream(engine, round % 5 ? 0 : SFR_SAVE_CHECK_BYTES)),
			 0);
		CHECK_EQ(fake_save(engine, dir, "b", &torch, 0), 0);
		CHECK(file_is(dir_path(dir, "b"), got, bag.len));
		fake_end(engine);
	}
	CHECK(!file_exists(dir_path(dir, "a")));
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

TEST(stream_of_torch_file_has_the_bytes_of_the_file)
{
	check_torch_rounds(30, 0);
}

TEST(stream_of_torch_file_from_devices_has_the_bytes_of_the_file)
{
	check_torch_rounds(30, 2);
}

static uint64_t key_of(const struct sfr_member *member)
{
	return sfr__extent_key(&flat.sources[member->source]);
}

static int by_key(const void *a, const void *b)
{
	uint64_t left = key_of(a), right = key_of(b);

	return left < right ? -1 : left > right;
}

/* A random flat file whose members are in the order of the lanes. */
static void make_flat(uint32_t nr_devices)
{
	flat_make(&flat, nr_devices);
	qsort(flat.members, flat.desc.nr_members, sizeof(flat.members[0]), by_key);
	flat_expect(&flat);
	for (uint32_t i = 0; i < FLAT_SOURCES; i++)
		if (flat.sources[i].device != 0)
			flat.sources[i].addr |= FAKE_CUDA_DEVICE;
}

TEST(stream_of_flat_file_is_its_header_and_members)
{
	static const uint64_t blocks[] = { 4096, 8192, 12288, 1 << 20 };
	unsigned nr_edges = 0;

	for (unsigned round = 0; round < 60 && check__nr_failed == 0; round++) {
		struct sfr_engine *engine;
		struct sfr_ticket *t;

		fake.fake_cuda_reset();
		engine = saving_engine_of(blocks[round % 4], 1 + round % 3, 1 + round % 5 / 3, 2);
		make_flat(round % 4);
		saving_poison(engine);
		CHECK_EQ(flat_stream(engine, round % 5 ? 0 : SFR_SAVE_CHECK_BYTES, &t), 0);
		nr_edges += t->plan.img.nr_edges;
		CHECK_EQ(stream_save(t), 0);
		check_got(flat.expected, flat.len);
		fake_end(engine);
	}
	CHECK(nr_edges > 60);
	CHECK(!file_exists(dir_path(dir, "a")));
}

/* Sources 0 to 2 are captured, the others deferred. Makes a member of each of `sources`. */
static void make_members(uint32_t header, uint32_t nr, const uint32_t *sources, uint64_t nbytes)
{
	flat_make(&flat, 0);
	for (uint32_t i = 0; i < FLAT_SOURCES; i++)
		flat.sources[i].lane = i < 3 ? SFR_CAPTURED : SFR_LANE_HOST;
	flat.desc.skeleton_len = header;
	flat.desc.nr_members = nr;
	for (uint32_t i = 0; i < nr; i++)
		flat.members[i] = (struct sfr_member){ .source = sources[i], .nbytes = nbytes };
	flat_expect(&flat);
}

TEST(file_whose_lanes_are_not_in_file_order_is_refused)
{
	struct sfr_engine *engine = saving_engine_of(4096, 2, 1, 2);
	struct sfr_ticket *t;

	make_members(100, 2, (const uint32_t[]){ 3, 0 }, 10000);
	CHECK_EQ(flat_stream(engine, 0, &t), -EINVAL);
	CHECK(t == NULL);
	make_members(100, 2, (const uint32_t[]){ 0, 3 }, 10000);
	CHECK_EQ(flat_stream(engine, 0, &t), 0);
	CHECK_EQ(stream_save(t), 0);
	check_got(flat.expected, flat.len);
	saving_end(engine);
}

TEST(stream_of_parts_is_the_parts)
{
	for (unsigned round = 0; round < 40 && check__nr_failed == 0; round++) {
		struct sfr_engine *engine =
			saving_engine_of(round % 2 ? 8192 : 65536, 1 + round % 3, 1 + round % 3, 2);
		struct list l = { 0 };
		struct sfr_ticket *t;

		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		for (unsigned i = 0; i < round % 6; i++) {
			const unsigned char *bytes = memory + flat_below(1000);

			if (flat_below(2))
				align(&l, bytes);
			else
				add_bytes(&l, memory, flat_below(300));
			add_source(&l, bytes, flat_below(4) ? flat_below(300000) : 0);
			if (flat_below(2))
				add_crc(&l, (uint32_t)flat_below(i + 1));
		}
		CHECK_EQ(new_save(engine, l.parts, SFR_SAVE_STREAM, &t), 0);
		sfr_parts_free(l.parts);
		CHECK_EQ(stream_save(t), 0);
		check_got(expected, l.len);
		saving_end(engine);
	}
}

/* ---- the order of leases ---- */

/* The host's lane is slow, and the lanes of two devices, whose blocks are behind, are not. */
TEST(lanes_that_race_lease_blocks_in_the_order_of_the_file)
{
	for (unsigned nr_blocks = 1; nr_blocks <= 4; nr_blocks++) {
		struct sfr_engine *engine;

		CHECK_EQ(sfr_inject_install(), 0);
		fake.fake_cuda_reset();
		engine = saving_engine(nr_blocks, 2, 2);
		saving_fill(&torch, 7);
		fake_put_on_device(&torch, 1, 2, 1);
		fake_put_on_device(&torch, 3, 4, 0);
		fake_put_on_device(&torch, 5, 6, 1);
		saving_slow("lane_copy", 3 * 1000 * 1000);
		CHECK_EQ(stream_save(torch_stream(engine, 0)), 0);
		sfr_inject_clear();
		CHECK_EQ(fake_save(engine, dir, "b", &torch, 0), 0);
		CHECK(file_is(dir_path(dir, "b"), got, bag.len));
		fake_end(engine);
		sfr_inject_uninstall();
	}
}

/* ---- one thread: what comes when ---- */

/* A state of which only the pickle is captured, in one block: its call needs no taker. */
static void fill_deferred(unsigned char value)
{
	saving_fill(&torch, value);
	for (uint32_t i = 0; i < SAVING_NR; i++)
		torch.sources[i].lane = SFR_LANE_HOST;
}

/* Takes a piece, and copies it to `got`. */
static struct sfr_file_piece taken(struct sfr_ticket *t)
{
	struct sfr_file_piece piece = { 0 };

	CHECK_EQ(sfr_stream_take_next_piece(t, PATIENCE_NS, &piece), 0);
	if (piece.len != 0)
		memcpy(got + piece.off, piece.mem, piece.len);
	return piece;
}

TEST(each_block_given_back_lets_one_more_be_taken)
{
	for (unsigned nr_blocks = 1; nr_blocks <= 3; nr_blocks++) {
		struct sfr_engine *engine = saving_engine(nr_blocks, 1, 2);
		struct sfr_file_piece held[3], piece;
		struct sfr_ticket *t;

		fill_deferred(1);
		t = torch_stream(engine, 0);
		CHECK_EQ(saving_submit(t), 0);
		for (unsigned i = 0; i < nr_blocks; i++)
			held[i] = taken(t);
		for (unsigned i = 0; i < 3; i++) {
			CHECK_EQ(sfr_stream_take_next_piece(t, 10 * 1000 * 1000, &piece),
				 SFR_EAGAIN);
			sfr_stream_give_back(t, &held[i % nr_blocks]);
			sfr_stream_give_back(t, &held[i % nr_blocks]); /* is given back already */
			held[i % nr_blocks] = taken(t);
		}
		CHECK_EQ(sfr_stream_take_next_piece(t, 10 * 1000 * 1000, &piece), SFR_EAGAIN);
		CHECK_EQ(sfr_save_cancel(t), 1);
		for (unsigned i = 0; i < nr_blocks; i++)
			sfr_stream_give_back(t, &held[i]);
		saving_finish(t);
		CHECK_EQ(saving_state_of(t), SFR_CANCELLED);
		check_all_is_back(engine);
		sfr_ticket_put(t);
		saving_end(engine);
	}
}

/* Takes and gives back every piece of a launched save, up to the end, which it returns. */
static struct sfr_file_piece take_up_to_end(struct sfr_ticket *t)
{
	struct sfr_file_piece piece = taken(t);

	bag.len = 0;
	while (piece.len != 0) {
		CHECK_EQ(piece.off, bag.len);
		bag.len += piece.len;
		sfr_stream_give_back(t, &piece);
		piece = taken(t);
	}
	CHECK_EQ(piece.off, bag.len);
	CHECK_EQ(piece.off, t->plan.img.len);
	return piece;
}

static void check_end_comes_again(struct sfr_ticket *t)
{
	struct sfr_file_piece piece;

	CHECK_EQ(sfr_stream_take_next_piece(t, 0, &piece), 0);
	CHECK_EQ(piece.len, 0);
	CHECK_EQ(piece.off, t->plan.img.len);
	CHECK(piece.owner == NULL);
	sfr_stream_give_back(t, &piece);
}

/* Takes everything of a save that is launched, and checks its end. */
static void check_end(struct sfr_ticket *t)
{
	struct sfr_file_piece piece = take_up_to_end(t);

	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	(void)sfr_save_give_verdict(t, -1); /* refused if nothing is deferred */
	check_end_comes_again(t);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_STAGED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, 10 * 1000 * 1000), SFR_EAGAIN);
	sfr_stream_give_back(t, &piece);
	/* Meanwhile the save frees what it does not need any more. */
	while (sfr_save_wait(t, SFR_WAIT_ENDED, 0) == SFR_EAGAIN)
		check_end_comes_again(t);
	saving_finish(t);
	CHECK_EQ(saving_state_of(t), SFR_DURABLE);
	check_end_comes_again(t);
	CHECK_EQ(sfr_save_cancel(t), 0);
	sfr_ticket_put(t);
}

static struct sfr_ticket *launched(struct sfr_ticket *t)
{
	CHECK_EQ(saving_submit(t), 0);
	return t;
}

TEST(save_to_a_stream_ends_only_when_its_end_piece_is_given_back)
{
	static const struct {
		uint32_t header, nr_members;
		uint64_t nbytes;
		uint32_t nr_edges;
	} files[] = {
		{ SFR_PAGE, 2, SFR_PAGE, 0 },
		{ 100, 0, 0, 0 },              /* without an edge page */
		{ 100, 1, 50, 1 },             /* nothing but an edge page */
		{ SFR_PAGE + 100, 2, 100, 1 }, /* at the very end */
		{ 100, 2, 3 * SFR_PAGE, 1 },   /* after the header */
	};
	struct sfr_engine *engine = saving_engine_of(8192, 4, 2, 2);
	struct list l = { 0 };
	struct sfr_ticket *t;

	for (unsigned i = 0; i < 20; i++) {
		fill_deferred(1);
		check_end(launched(torch_stream(engine, 0)));
	}
	for (unsigned i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
		make_members(files[i].header, files[i].nr_members, (const uint32_t[]){ 3, 4 },
			     files[i].nbytes);
		CHECK_EQ(flat_stream(engine, 0, &t), 0);
		CHECK_EQ(t->plan.img.nr_edges, files[i].nr_edges);
		check_end(launched(t));
		check_got(flat.expected, flat.len);
	}
	CHECK_EQ(sfr_parts_new(&l.parts), 0); /* an empty file */
	CHECK_EQ(new_save(engine, l.parts, SFR_SAVE_STREAM, &t), 0);
	sfr_parts_free(l.parts);
	check_end(launched(t));
	CHECK_EQ(bag.len, 0);
	check_all_is_back(engine);
	saving_end(engine);
}

TEST(only_an_admitted_stream_has_pieces)
{
	struct sfr_engine *engine = saving_engine(8, 1, 2);
	struct sfr_file_piece piece;
	struct sfr_ticket *t;

	fill_deferred(1);
	t = torch_stream(engine, 0);
	CHECK_EQ(sfr_stream_take_next_piece(t, 1000 * 1000, &piece), SFR_EAGAIN);
	sfr_ticket_put(t);
	t = saving_started(engine, dir, "b", &torch, 0);
	CHECK_EQ(sfr_stream_take_next_piece(t, SFR_FOREVER, &piece), SFR_ESTATE);
	saving_done(t);
	saving_end(engine);
}

/* ---- saves that fail ---- */

enum way { CANCELLED, TORN };

/* Ends a save that has begun to fail, of which the caller has pieces. */
static void check_failed(struct sfr_ticket *t, struct sfr_file_piece *held, unsigned nr, int code)
{
	struct sfr_engine *engine = t->engine;
	struct sfr_report report;
	struct sfr_file_piece piece;

	CHECK_EQ(sfr_stream_take_next_piece(t, SFR_FOREVER, &piece), SFR_ESTATE);
	if (nr != 0)
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, 1000 * 1000), SFR_EAGAIN);
	while (nr-- > 0) {
		CHECK(held[nr].len == 0 || /* it has stayed the same */
		      memcmp(held[nr].mem, got + held[nr].off, held[nr].len) == 0);
		sfr_stream_give_back(t, &held[nr]);
	}
	/* A late cancel meets a save that is being freed. */
	while (sfr_save_wait(t, SFR_WAIT_ENDED, 0) == SFR_EAGAIN)
		CHECK_EQ(sfr_save_cancel(t), code == SFR_ECANCELLED);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.err.code, code);
	CHECK_EQ(sfr_stream_take_next_piece(t, SFR_FOREVER, &piece), SFR_ESTATE);
	check_all_is_back(engine);
	sfr_ticket_put(t);
}

/* Takes `nr` pieces, of which it holds `most` at the end; then the save fails. Returns whether the
 * last one was the end. */
static bool fail_after(struct sfr_ticket *t, unsigned nr, unsigned most, enum way way)
{
	struct sfr_file_piece held[MOST_HELD];
	unsigned nr_held = 0;
	bool ended = false;

	for (unsigned i = 0; i < nr && !ended; i++) {
		if (nr_held == most) {
			sfr_stream_give_back(t, &held[0]);
			held[0] = held[--nr_held];
		}
		held[nr_held] = taken(t);
		ended = held[nr_held++].len == 0;
	}
	if (way == TORN && most == MOST_HELD) { /* all blocks are there */
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_give_verdict(t, 3), 0);
		check_failed(t, held, nr_held, SFR_ETORN);
	} else {
		CHECK_EQ(sfr_save_cancel(t), 1);
		check_failed(t, held, nr_held, SFR_ECANCELLED);
	}
	return ended;
}

static struct sfr_ticket *failing_save(struct sfr_engine *engine, unsigned format)
{
	static const uint32_t sources[] = { 3, 4, 5 };
	struct list l = { 0 };
	struct sfr_ticket *t = NULL;

	switch (format) {
	case 0:
		fill_deferred(1);
		return torch_stream(engine, 0);
	case 1:
		make_members(5000, 3, sources, 9000);
		CHECK_EQ(flat_stream(engine, 0, &t), 0);
		return t;
	default:
		CHECK_EQ(sfr_parts_new(&l.parts), 0);
		align(&l, memory);
		add_source(&l, memory, 50000);
		add_crc(&l, 0);
		add_source(&l, memory + 1, 20000);
		CHECK_EQ(new_save(engine, l.parts, SFR_SAVE_STREAM, &t), 0);
		sfr_parts_free(l.parts);
		return t;
	}
}

TEST(save_that_fails_at_any_piece_ends_when_all_pieces_are_given_back)
{
	for (unsigned format = 0; format < 3; format++)
		for (unsigned way = 0; way < 4; way++) {
			/* writers prepare only a few blocks of a file of parts at a time */
			const unsigned most = way % 2 == 0 ? 1 : format == 2 ? 3 : MOST_HELD;
			struct sfr_engine *engine =
				saving_engine(way % 2 ? 30 : 1 + format % 2, 2, 2);
			bool ended = false;

			for (unsigned nr = 0; !ended && CHECK(nr < MOST_HELD); nr++) {
				struct sfr_ticket *t = failing_save(engine, format);

				ended = fail_after(launched(t), nr, most,
						   way == 3 && format < 2 ? TORN : CANCELLED);
			}
			saving_end(engine);
		}
}

/* A store can refuse an object before the call has got to the admission. */
TEST(stream_that_was_cancelled_before_its_admission_ends)
{
	struct sfr_engine *engine = saving_engine(30, 2, 2);

	for (unsigned format = 0; format < 3; format++) {
		struct sfr_ticket *t = failing_save(engine, format);

		CHECK_EQ(sfr_save_cancel(t), 1);
		check_failed(launched(t), NULL, 0, SFR_ECANCELLED);
	}
	saving_end(engine);
}

/* Everything is in the stream, the tail too, and the caller has taken nothing. */
TEST(cancel_frees_all_blocks_of_a_stream_that_nobody_has_taken)
{
	struct sfr_engine *engine = saving_engine(30, 2, 2);

	for (unsigned format = 0; format < 3; format++) {
		struct sfr_ticket *t = launched(failing_save(engine, format));
		const struct sfr__job *tail = sfr__ticket_job(t, SFR__JOB_TAIL);
		struct sfr_file_piece piece = { 0 };

		if (t->plan.in_place)
			piece = taken(t); /* its last blocks come when others are given back */
		else
			while (!sfr__under(&engine->mu, tail->was_put))
				(void)usleep(100);
		CHECK_EQ(sfr_save_cancel(t), 1);
		check_failed(t, &piece, piece.owner != NULL, SFR_ECANCELLED);
	}
	saving_end(engine);
}

TEST(save_abandoned_in_its_call_ends_when_all_pieces_are_given_back)
{
	for (unsigned nr_blocks = 1; nr_blocks <= 2; nr_blocks++)
		for (unsigned nr = 0; nr <= nr_blocks; nr++) {
			struct sfr_engine *engine = saving_engine(nr_blocks, 1, 2);
			struct sfr_file_piece held[2];
			struct sfr_ticket *t;

			saving_fill(&torch, 1); /* 20,000 bytes are captured: three blocks */
			t = torch_stream(engine, 0);
			CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
			CHECK_EQ(sfr_save_capture(t, 1000 * 1000), SFR_EAGAIN);
			for (unsigned i = 0; i < nr; i++)
				held[i] = taken(t);
			sfr_save_abandon(t);
			check_failed(t, held, nr, SFR_ECANCELLED);
			saving_end(engine);
		}
}

TEST(torn_sources_fail_the_stream)
{
	for (unsigned check_bytes = 0; check_bytes < 2; check_bytes++) {
		struct sfr_engine *engine = saving_engine(3, 1, 2);
		struct sfr_report report;
		struct sfr_ticket *t;

		fill_deferred(1);
		t = torch_stream(engine, check_bytes ? SFR_SAVE_CHECK_BYTES : 0);
		CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
		begin_to_take(t);
		CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
		if (check_bytes)
			torch.bytes[4][SAVING_LEN / 2]++;
		else
			memset(torch.bytes[4], 9, SAVING_LEN);
		CHECK_EQ(sfr_save_launch(t), 0);
		saving_finish(t);
		CHECK_EQ(end_of_taking(), SFR_ESTATE);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.err.code, SFR_ETORN);
		CHECK_EQ(report.err.index, 4);
		check_all_is_back(engine);
		sfr_ticket_put(t);
		saving_end(engine);
	}
}

TEST(save_fails_without_memory_for_the_directory)
{
	const struct sfr_fault none = {
		.call = "mmap", .nth = 1, .sticky = 1, .err = ENOMEM, .limit = -1
	};
	struct sfr_engine *engine;
	struct sfr_report report;
	struct sfr_ticket *t;

	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine(3, 1, 2);
	CHECK_EQ(sfr_engine_warm_up(engine, 3 * SAVING_BLOCK), 0);
	fill_deferred(1);
	t = torch_stream(engine, 0);
	CHECK_EQ(sfr_inject_add_fault(&none), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	begin_to_take(t);
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(t), 0);
	saving_finish(t);
	CHECK_EQ(end_of_taking(), SFR_ESTATE);
	sfr_inject_clear();
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.err.code, -ENOMEM);
	CHECK(strcmp(report.err.note, "no memory for the directory") == 0);
	check_all_is_back(engine);
	sfr_ticket_put(t);
	saving_end(engine);
	sfr_inject_uninstall();
}

/* Nothing is opened, written, synced or renamed. */
TEST(stream_makes_no_file)
{
	static const char *const calls[] = { "open", "pwrite", "fdatasync", "rename" };

	for (unsigned i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		const struct sfr_fault refused = {
			.call = calls[i], .nth = 1, .sticky = 1, .err = EIO, .limit = -1
		};
		struct sfr_engine *engine;

		CHECK_EQ(sfr_inject_install(), 0);
		engine = saving_engine(2, 1, 2);
		fill_deferred(1);
		CHECK_EQ(sfr_inject_add_fault(&refused), 0);
		CHECK_EQ(stream_save(torch_stream(engine, SFR_SAVE_DURABLE)), 0);
		CHECK_EQ(sfr_inject_hits(), 0);
		sfr_inject_clear();
		saving_end(engine);
		sfr_inject_uninstall();
	}
}

static struct sfr_engine *small_engine(int *rc)
{
	const struct sfr_engine_opts opts = {
		.pool_bytes = 8192, .block_bytes = 4096, .nr_writers = 1, .max_in_flight = 1
	};
	struct sfr_engine *engine = NULL;

	*rc = sfr_engine_new(&opts, &engine);
	return engine;
}

TEST(stream_is_whole_or_fails_when_any_allocation_fails)
{
	for (unsigned format = 0; format < 2; format++)
		FOR_EVERY_FAILURE(run, "*", ENOMEM)
		{
			int rc;
			struct sfr_engine *engine = small_engine(&rc);
			struct sfr_ticket *t = NULL;

			make_members(100, 2, (const uint32_t[]){ 0, 3 }, 9000);
			saving_fill(&torch, 1);
			if (rc == 0 && format == 0)
				rc = saving_new(engine, dir, "a", &torch, SFR_SAVE_STREAM, &t);
			else if (rc == 0)
				rc = flat_stream(engine, 0, &t);
			if (rc == 0)
				rc = stream_save(t);
			CHECK(rc == 0 || check_acted(&run));
			check_end_fault(&run);
			if (rc == 0 && format == 1)
				check_got(flat.expected, flat.len);
			if (engine)
				saving_end(engine);
		}
}

/* ---- calls while a save frees its jobs ---- */

static struct sfr_sys plain;
static _Atomic(void *) watched_jobs;
static atomic_bool freed, go_on;

static void free_and_wait(void *block)
{
	bool watched = block != NULL && block == watched_jobs;

	plain.free(block);
	if (!watched)
		return;
	freed = true;
	while (!go_on)
		(void)usleep(100);
}

TEST(save_that_is_ending_has_no_jobs_any_more)
{
	for (unsigned cancel = 0; cancel < 2; cancel++) {
		struct sfr_engine *engine;
		struct sfr_file_piece piece;
		struct sfr_ticket *t;

		plain = sfr_sys;
		sfr_sys.free = free_and_wait;
		freed = go_on = false;
		engine = saving_engine(30, 2, 2);
		fill_deferred(1);
		t = launched(torch_stream(engine, 0));
		watched_jobs = t->plan.jobs;
		piece = cancel ? taken(t) : take_up_to_end(t);
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
		if (cancel)
			CHECK_EQ(sfr_save_cancel(t), 1);
		else
			CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
		sfr_stream_give_back(t, &piece);
		while (!freed)
			(void)usleep(100);
		CHECK_EQ(sfr_save_cancel(t), cancel);
		if (!cancel)
			check_end_comes_again(t);
		go_on = true;
		saving_done(t);
		saving_end(engine);
		sfr_sys = plain;
	}
}

/* ---- fork ---- */

TEST(forked_child_takes_and_gives_back_nothing)
{
	struct sfr_engine *engine = saving_engine(2, 1, 2);
	struct sfr_file_piece piece, other;
	struct sfr_ticket *t;
	int status = -1;
	pid_t child;

	fill_deferred(1);
	t = launched(torch_stream(engine, 0));
	piece = taken(t);
	child = fork();
	if (child == 0) {
		bool ok = sfr_stream_take_next_piece(t, SFR_FOREVER, &other) == SFR_EFORK;

		sfr_stream_give_back(t, &piece);
		_exit(ok && piece.owner != NULL && t->facts.written_nbytes == 0 ? 0 : 1);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	sfr_stream_give_back(t, &piece);
	CHECK_EQ(t->facts.written_nbytes, t->plan.img.extents[0].len);
	CHECK_EQ(sfr_save_cancel(t), 1);
	check_failed(t, NULL, 0, SFR_ECANCELLED);
	saving_end(engine);
}

BEGIN
{
	if (!fake_load())
		return false;
	if (!list_begin())
		exit(EXIT_FAILURE);
	sfr__host_tune(4096, 8192); /* so that copiers help with small copies too */
	return true;
}
