/* loads.c: which file a load opens that waits in the log, and that nothing is left open. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>

#include "saving.h"

static const char *dir;
static struct saving_state one;
static struct sfr_engine *engine;

static struct sfr_ticket *submit(const char *name)
{
	return saving_started(engine, dir, name, &one, SFR_SAVE_DURABLE);
}

static void finish(struct sfr_ticket *t)
{
	uint64_t seq = 0;

	saving_done(t);
	CHECK_EQ(sfr_log_drain(&seq, SFR_FOREVER), 0);
}

/* Counts our open descriptors of this path. */
static unsigned nr_open(const char *path)
{
	struct dirent *entry;
	unsigned nr = 0;
	DIR *fds = opendir("/proc/self/fd");

	while (fds != NULL && (entry = readdir(fds)) != NULL) {
		char name[64], target[PATH_MAX] = "";

		(void)snprintf(name, sizeof(name), "/proc/self/fd/%.20s", entry->d_name);
		if (readlink(name, target, sizeof(target) - 1) > 0 && strcmp(target, path) == 0)
			nr++;
	}
	(void)closedir(fds);
	return nr;
}

/* Somebody else made a FIFO at the path of a later save. Opening it must not wait for a writer. */
TEST(load_of_a_fifo_does_not_block_the_log)
{
	const char *path = dir_path(dir, "fifo");
	struct sfr_ticket *t = submit("fifo");
	struct sfr_log_load *load = NULL;
	int fd = -1, writer;

	CHECK_EQ(sfr_log_load_new(path, &load), 0);
	CHECK_EQ(mkfifo(path, 0600), 0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(t, 4), 0); /* the save fails, so the FIFO stays */
	CHECK_EQ(sfr_log_load_wait(load, UINT64_C(10000000000), &fd), 0);
	/* ends the wait of a load that waits nevertheless */
	writer = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
	finish(t);
	CHECK(fd >= 0 && writer >= 0);
	(void)close(fd);
	(void)close(writer);
	sfr_log_load_free(load);
}

TEST(signal_during_open_is_retried)
{
	const struct sfr_fault fault = { .call = "open", .nth = 1, .err = EINTR, .limit = -1 };
	struct sfr_log_load *load = NULL;
	int fd = -1;

	finish(submit("signal"));
	sfr_inject_clear();
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "signal"), &load), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), 0);
	CHECK_EQ(sfr_inject_hits(), 1);
	sfr_inject_clear();
	CHECK(fd >= 0);
	(void)close(fd);
	sfr_log_load_free(load);
}

TEST(abandoned_load_leaves_no_open_descriptor)
{
	const char *path = dir_path(dir, "left");
	struct sfr_ticket *t = submit("left");
	struct sfr_log_load *load = NULL;

	CHECK_EQ(sfr_log_load_new(path, &load), 0);
	sfr_log_load_free(load);
	finish(t);
	CHECK_EQ(saving_content(dir, "left"), 1);
	CHECK_EQ(nr_open(path), 0);
}

static void end_engine(void)
{
	saving_end(engine);
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&one, 1);
	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine(64, 1, 4);
	check_at_end(end_engine);
	return true;
}
