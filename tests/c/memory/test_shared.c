/* A pool whose memory is a file: what other processes see, how memory is given and taken, and
 * refusals of the system. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "fix_dir.h"
#include "pool_helpers.h"

static int file_of(struct sfr__pool *pool, const struct sfr__block *block, uint64_t *off)
{
	return sfr__pool_get_file_and_offset(pool, block->mem, off);
}

static uint64_t bytes_in(int fd)
{
	struct stat st;

	return CHECK_EQ(fstat(fd, &st), 0) ? (uint64_t)st.st_blocks * 512 : 0;
}

static struct sfr__pool *make_shared(void)
{
	struct sfr__pool *pool = NULL;

	CHECK_EQ(sfr__pool_new(12 * MIB, 4 * MIB, true, &pool), 0);
	return pool;
}

TEST(bytes_written_to_a_shared_block_are_in_the_file)
{
	struct sfr__pool *pool = make_shared();
	struct sfr__block *first = lease(pool, 4 * MIB), *second = lease(pool, MIB);
	uint64_t off = 1;
	char byte = 0;
	int fd = file_of(pool, first, &off);

	CHECK(off == 0);
	CHECK_EQ(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
	CHECK_EQ(file_of(pool, second, &off), fd);
	CHECK(off == 4 * MIB);
	second->mem[123] = 'x';
	CHECK_EQ(pread(fd, &byte, 1, (off_t)off + 123), 1);
	CHECK_EQ(byte, 'x');
	CHECK(all_resident(first->mem, 4 * MIB));
	CHECK(bytes_in(fd) == 6 * MIB); /* a small request gets 2 MiB */
	sfr__pool_put(pool, first);
	sfr__pool_put(pool, second);
	sfr__pool_free(pool);
}

TEST(trim_frees_the_files_memory)
{
	struct sfr__pool *pool = make_shared();
	struct sfr__block *block = lease(pool, 4 * MIB), *kept = lease(pool, 4 * MIB);
	uint64_t off;
	int fd = file_of(pool, block, &off);

	memset(block->mem, 'a', 4 * MIB);
	memset(kept->mem, 'b', 4 * MIB);
	sfr__pool_put(pool, block);
	CHECK_EQ(sfr__pool_trim(pool), 0);
	CHECK(bytes_in(fd) == 4 * MIB && stats(pool).committed_bytes == 4 * MIB);
	CHECK_EQ(kept->mem[MIB], 'b');
	block = lease(pool, 4 * MIB);
	CHECK_EQ(block->mem[MIB], 0);
	CHECK(bytes_in(fd) == 8 * MIB);
	sfr__pool_put(pool, block);
	sfr__pool_put(pool, kept);
	sfr__pool_free(pool);
}

TEST(freeing_a_shared_pool_frees_its_memory_despite_open_descriptors)
{
	struct sfr__pool *pool = make_shared();
	struct sfr__block *block = lease(pool, 4 * MIB);
	uint64_t off;
	int fd = dup(file_of(pool, block, &off)); /* as a forked child inherits it */

	CHECK(bytes_in(fd) == 4 * MIB);
	sfr__pool_put(pool, block);
	sfr__pool_free(pool);
	CHECK(bytes_in(fd) == 0);
	(void)close(fd);
}

TEST(file_size_limit_gives_an_error_without_a_signal)
{
	struct rlimit old, small = { 0 };
	struct sfr__pool *pool = NULL;

	CHECK_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
	small = (struct rlimit){ 12 * MIB - 1, old.rlim_max };
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
	CHECK_EQ(sfr__pool_new(12 * MIB, 4 * MIB, true, &pool), -EFBIG);
	CHECK(pool == NULL);
	small.rlim_cur = 12 * MIB;
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
	pool = make_shared();
	sfr__pool_put(pool, lease(pool, 4 * MIB));
	sfr__pool_free(pool);
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
}

/* ---- systems that refuse ---- */

static struct sfr_fault faults[2];

static void set_fault(int i, const char *call, uint64_t nth, int err, int sticky)
{
	faults[i] = (struct sfr_fault){
		.call = call, .nth = nth, .err = err, .limit = -1, .sticky = sticky
	};
	CHECK_EQ(sfr_inject_add_fault(&faults[i]), 0);
}

/* Before Linux 5.14 the advice is unknown, and only pages that exist may be touched. */
TEST(shared_pages_are_allocated_before_they_are_touched)
{
	struct sfr__pool *pool = make_shared();
	struct sfr__block *block = NULL;
	uint64_t off;

	refuse_populate = EINVAL;
	sfr_sys.madvise = fault_madvise;
	CHECK_EQ(sfr_inject_install(), 0);
	block = lease(pool, 4 * MIB);
	CHECK_EQ(sfr_inject_count_calls("fallocate"), 1);
	CHECK(all_resident(block->mem, 4 * MIB));
	CHECK(bytes_in(file_of(pool, block, &off)) == 4 * MIB);
	sfr__pool_put(pool, block);
	set_fault(0, "fallocate", 1, EINTR, 0);
	set_fault(1, "fallocate", 2, ENOSPC, 0);
	CHECK_EQ(sfr__pool_warm_up(pool, 8 * MIB), -ENOMEM); /* asked again after a signal */
	CHECK_EQ(sfr_inject_count_calls("fallocate"), 3);
	CHECK(stats(pool).committed_bytes == 4 * MIB);
	sfr_inject_uninstall();
	refuse_populate = 0;
	sfr_sys.madvise = madvise;
	sfr__pool_free(pool);
}

TEST(page_without_memory_gives_an_error_not_a_signal)
{
	struct sfr__pool *pool = make_shared();
	struct sfr__block *block = NULL;

	refuse_populate = EFAULT; /* the advice's error where a touch would raise a signal */
	sfr_sys.madvise = fault_madvise;
	CHECK_EQ(sfr__pool_get(pool, 1, 4 * MIB, 0, &block), -ENOMEM);
	refuse_populate = 0;
	sfr_sys.madvise = madvise;
	sfr__pool_put(pool, lease(pool, 4 * MIB));
	sfr__pool_free(pool);
}

TEST(every_refusal_leaves_neither_descriptor_nor_memory)
{
	int before = nr_fds();

	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		struct sfr__pool *pool = NULL;
		struct sfr__block *block = NULL;
		int rc = sfr__pool_new(12 * MIB, 4 * MIB, true, &pool);

		CHECK(rc == 0 || (rc == -ENOMEM && check_acted(&run)));
		CHECK((rc == 0) == (pool != NULL));
		if (pool != NULL) {
			rc = sfr__pool_get(pool, 1, 4 * MIB, 0, &block);
			CHECK(rc == 0 || (rc == -ENOMEM && check_acted(&run)));
			if (block != NULL)
				sfr__pool_put(pool, block);
			rc = sfr__pool_trim(pool);
			CHECK(rc == 0 || check_acted(&run));
			check_end_fault(&run);
			block = lease(pool, 4 * MIB);
			memset(block->mem, 1, 4 * MIB);
			sfr__pool_put(pool, block);
		}
		check_end_fault(&run);
		sfr__pool_free(pool);
		CHECK_EQ(nr_fds(), before);
	}
}

TEST(shared_pool_fails_without_memfd)
{
	struct sfr__pool *pool = NULL;

	CHECK_EQ(sfr_inject_install(), 0);
	set_fault(0, "memfd", 1, ENOSYS, 0);
	CHECK_EQ(sfr__pool_new(12 * MIB, 4 * MIB, true, &pool), -ENOSYS);
	CHECK(pool == NULL);
	sfr_inject_uninstall();
}
