/* A block that somebody takes over while a thread makes memory of it: its pages stay where they are
 * until the thread has left them, whoever wants to take them meanwhile. */
#include <sys/syscall.h>

#include "cuda/fake.h"
#include "pool_helpers.h"

static struct sfr__pool *pool;
static pthread_barrier_t let_go_on;
static __thread bool is_maker;
static __thread int refusal;    /* errno for who takes the block over, or 0 */
static atomic_bool stands;      /* the maker does, in its second piece */
static atomic_bool taken;       /* memory was, meanwhile */
static atomic_int taker;        /* the thread that takes the block over; -1: it has ended */
static struct sfr__block *kept; /* what it still has then */

static int watched_madvise(void *addr, size_t len, int advice)
{
	static __thread int nr_pieces;
	int rc;

	if (advice == MADV_DONTNEED || advice == MADV_REMOVE)
		atomic_store(&taken, atomic_load(&stands) || atomic_load(&taken));
	if (advice != MADV_POPULATE_WRITE || (!is_maker && refusal == 0))
		return madvise(addr, len, advice);
	if (!is_maker) {
		errno = refusal;
		return -1;
	}
	if (++nr_pieces != 2)
		return madvise(addr, len, advice);
	atomic_store(&stands, true);
	(void)pthread_barrier_wait(&let_go_on);
	(void)pthread_barrier_wait(&let_go_on);
	/* Where they are not open the kernel says what an old one says of the advice. */
	rc = madvise(addr, len, advice);
	atomic_store(&stands, false);
	return rc;
}

static bool always(void *arg)
{
	(void)arg;
	return true;
}

static void *make_ahead(void *arg)
{
	is_maker = true;
	(void)sfr__pool_supply(pool, always, NULL);
	return arg;
}

/* Whether the thread sleeps: it holds no lock that anybody else wants, so it waits for the maker. */
static bool sleeps(int tid)
{
	char path[64], text[256] = "", *state;
	int fd;

	(void)snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof(text) - 1) < 0)
		text[0] = '\0';
	(void)close(fd);
	state = strrchr(text, ')');
	return state != NULL && state[2] == 'S';
}

static void *take_over(void *arg)
{
	void (*const *take)(void) = arg;

	atomic_store(&taker, (int)syscall(SYS_gettid));
	(*take)();
	atomic_store(&taker, -1);
	return NULL;
}

static uint64_t resident(const char *mem, size_t len)
{
	static unsigned char pages[8 * MIB / SFR_PAGE];
	uint64_t nr = 0;

	CHECK_EQ(mincore((void *)(uintptr_t)mem, len, pages), 0);
	for (size_t i = 0; i < len / SFR_PAGE; i++)
		nr += pages[i] & 1;
	return nr * SFR_PAGE;
}

/* The only block: a maker has made 2 MiB of it, and stands in the next 2 until `take` is through, or
 * waits. Then there is as much as is counted. */
static void take_from_a_thread_that_stands(void (*take)(void), uint64_t left)
{
	for (int shared = 0; shared < 2; shared++) {
		pthread_t maker, other;

		pool = NULL;
		if (!CHECK_EQ(sfr__pool_new(8 * MIB, 8 * MIB, shared != 0, &pool), 0))
			return;
		(void)pthread_barrier_init(&let_go_on, NULL, 2);
		atomic_store(&taken, false);
		atomic_store(&taker, 0);
		sfr__pool_join(pool, 1);
		CHECK_EQ(pthread_create(&maker, NULL, make_ahead, NULL), 0);
		(void)pthread_barrier_wait(&let_go_on);
		CHECK_EQ(pthread_create(&other, NULL, take_over, &take), 0);
		while (!atomic_load(&taken) && atomic_load(&taker) >= 0 &&
		       !(atomic_load(&taker) > 0 && sleeps(atomic_load(&taker))))
			(void)usleep(200);
		CHECK(!atomic_load(&taken));
		(void)pthread_barrier_wait(&let_go_on);
		CHECK_EQ(pthread_join(maker, NULL), 0);
		CHECK_EQ(pthread_join(other, NULL), 0);
		CHECK_EQ(resident(pool->range.base, 8 * MIB), left);
		if (!sfr__pin_is_foreign(&pool->blocks[0]))
			CHECK_EQ(stats(pool).committed_bytes, left);
		CHECK_EQ(stats(pool).leased_bytes, kept != NULL ? left : 0);
		if (kept != NULL)
			sfr__pool_put(pool, kept);
		kept = NULL;
		CHECK_EQ(stats(pool).leased_bytes, 0);
		CHECK_EQ(sfr__pool_trim(pool), 0);
		CHECK_EQ(stats(pool).committed_bytes, 0);
		CHECK_EQ(resident(pool->range.base, 8 * MIB), 0);
		sfr__pool_leave(pool, 1);
		sfr__pool_free(pool);
		(void)pthread_barrier_destroy(&let_go_on);
	}
}

static void be_refused_the_rest(void)
{
	struct sfr__block *block;

	refusal = ENOMEM;
	CHECK_EQ(sfr__pool_get(pool, 1, 8 * MIB, 0, &block), -ENOMEM);
	CHECK_EQ(stats(pool).committed_bytes, 2 * MIB);
}

TEST(a_save_that_the_system_refuses_memory_leaves_it_to_who_makes_it)
{
	take_from_a_thread_that_stands(be_refused_the_rest, 2 * MIB);
}

static void be_refused_as_a_writer(void)
{
	refusal = ENOMEM;
	sfr__pool_keep_pace(pool, 0, 1, always, NULL);
	CHECK_EQ(stats(pool).committed_bytes, 2 * MIB);
}

TEST(so_does_a_writer_that_goes_on_with_the_block)
{
	take_from_a_thread_that_stands(be_refused_as_a_writer, 2 * MIB);
}

static bool never(void *arg)
{
	(void)arg;
	return false;
}

static void give_up_as_a_writer(void)
{
	sfr__pool_keep_pace(pool, 0, 1, never, NULL);
}

static void want_no_more_than_there_is(void)
{
	kept = lease(pool, MIB);
}

/* The thread is in its second piece when it loses the block: that counts once it is there. */
TEST(what_a_thread_makes_of_a_block_that_it_has_lost_is_counted)
{
	take_from_a_thread_that_stands(give_up_as_a_writer, 4 * MIB);
	take_from_a_thread_that_stands(want_no_more_than_there_is, 4 * MIB);
}

/* The memory that a driver gives takes the place of the block's own. */
static void be_given_memory_of_a_driver(void)
{
	const struct sfr__cuda *cu = sfr__cuda_get(NULL, 0);
	struct sfr__cuda_scope scope;
	struct sfr__block *block = lease(pool, 8 * MIB);
	char why[160];

	fake.fake_cuda_fail("cuMemHostRegister_v2", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_EQ(sfr__pin_on(&pool->pin, cu, 0, why, sizeof(why)), 0);
	CHECK_EQ(sfr__cuda_enter(&scope, cu, pool->pin.context), CUDA_SUCCESS);
	sfr__pool_pin_blocks(pool, &block, 1);
	sfr__cuda_leave(&scope);
	CHECK(sfr__pin_is_foreign(block));
	memset(block->mem, 1, 8 * MIB);
	sfr__pool_put(pool, block);
	fake.fake_cuda_reset();
}

TEST(so_does_who_has_the_driver_s_memory_in_its_place)
{
	take_from_a_thread_that_stands(be_given_memory_of_a_driver, 0);
	fake_check();
	fake_check_nothing_left();
}

int main(void)
{
	if (!fake_load())
		return CHECK_SKIPPED;
	sfr_sys.madvise = watched_madvise;
	check_run();
	return check_done();
}
