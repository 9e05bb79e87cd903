/* Records the calls of a run that change the disk, in their order.
 *
 * The record is made through the system-call table, with a lock held during each call, so its
 * order is one that the kernel may have seen. The test adds facts between the calls: a save
 * began, a save was reported durable, a remove of a name was submitted. */
#ifndef CRASH_RECORD_H
#define CRASH_RECORD_H

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include "saving.h"

enum {
	CRASH_MAX_OPS = 512,
	CRASH_MAX_NAMES = 32,
	CRASH_MAX_LEN = 1 << 17,
	CRASH_MEMO = 1 << 20,
	CRASH_SECTOR = 512,
	CRASH_PATH = 512, /* longest path */
};

enum crash_kind {
	CRASH_CREATE,
	CRASH_WRITE,
	CRASH_SIZE, /* fallocate */
	CRASH_RENAME,
	CRASH_UNLINK,
	CRASH_LAST_CALL = CRASH_UNLINK, /* calls up to this one may be lost */
	CRASH_SYNC,
	CRASH_SYNC_DIR,
	/* not calls: facts that the test adds */
	CRASH_BEGUN,   /* a save of `value` to `name` is about to be submitted */
	CRASH_DURABLE, /* the save was reported durable */
	CRASH_REMOVED, /* a remove of `name` is about to be submitted */
};

struct crash_op {
	enum crash_kind kind;
	int inode; /* of the bytes or of the name */
	uint64_t off, len;
	unsigned char *bytes;         /* WRITE */
	char name[CRASH_PATH];        /* RENAME: the old one; SYNC_DIR: of the directory */
	char to[CRASH_PATH];          /* RENAME */
	int value;                    /* BEGUN, DURABLE */
	unsigned char choice, synced; /* while enumerating */
};

enum { CRASH_ABSENT, CRASH_WHOLE, CRASH_TORN };

struct crash_name {
	const char *name;
	int inode;
};

static struct {
	/* held during each recorded call, so that the record has the order of the calls */
	pthread_mutex_t mu;
	struct sfr_sys plain;
	struct crash_op ops[CRASH_MAX_OPS];
	int nr_ops, nr_inodes;
	int inode_of_fd[1024]; /* -1: none */
	char dir_of_fd[1024][CRASH_PATH];
	bool lost; /* the record is incomplete, so the test is wrong */
	/* ---- for the enumeration ---- */
	unsigned char image[CRASH_MAX_LEN];
	struct {
		uint64_t key;
		int found;
	} memo[CRASH_MEMO];
	int memfd;
} crash = { .mu = PTHREAD_MUTEX_INITIALIZER, .memfd = -1 };

/* ---- recording ------------------------------------------------------------ */

static void crash__copy(char *to, const char *path)
{
	crash.lost = snprintf(to, CRASH_PATH, "%s", path) >= CRASH_PATH || crash.lost;
}

static struct crash_op *crash__add(enum crash_kind kind, int inode, const char *name)
{
	struct crash_op *op;

	if (crash.nr_ops == CRASH_MAX_OPS) {
		crash.lost = true;
		return &crash.ops[CRASH_MAX_OPS - 1];
	}
	op = &crash.ops[crash.nr_ops++];
	*op = (struct crash_op){ .kind = kind, .inode = inode };
	crash__copy(op->name, name ? name : "");
	return op;
}

/* Returns the inode that a name leads to now; -1: none. */
static int crash__inode(const char *name)
{
	int inode = -1;

	for (int i = 0; i < crash.nr_ops; i++) {
		const struct crash_op *op = &crash.ops[i];

		if (op->kind == CRASH_CREATE && strcmp(op->name, name) == 0)
			inode = op->inode;
		if (op->kind == CRASH_RENAME && strcmp(op->to, name) == 0)
			inode = op->inode;
		if ((op->kind == CRASH_UNLINK || op->kind == CRASH_RENAME) &&
		    strcmp(op->name, name) == 0)
			inode = -1;
	}
	return inode;
}

/* Returns the full path of a name in an open directory, in one of a few buffers. Needs the lock. */
static const char *crash__path(int dir, const char *name)
{
	static char paths[2][CRASH_PATH];
	static unsigned next;
	char *path = paths[next++ % 2];

	if (dir < 0 || name[0] == '/')
		return name;
	crash.lost =
		snprintf(path, CRASH_PATH, "%s/%s", crash.dir_of_fd[dir], name) >= CRASH_PATH ||
		crash.lost;
	return path;
}

static int crash__open(int dir, const char *name, int flags, mode_t mode)
{
	const char *path;
	int fd;

	pthread_mutex_lock(&crash.mu);
	fd = crash.plain.open(dir, name, flags, mode);
	path = crash__path(dir, name);
	if (fd >= 0 && fd < 1024) {
		crash.inode_of_fd[fd] = -1;
		crash__copy(crash.dir_of_fd[fd], flags & O_DIRECTORY ? path : "");
		if (flags & O_CREAT) {
			crash.inode_of_fd[fd] = crash.nr_inodes++;
			(void)crash__add(CRASH_CREATE, crash.inode_of_fd[fd], path);
		}
	}
	crash.lost = crash.lost || fd >= 1024;
	pthread_mutex_unlock(&crash.mu);
	return fd;
}

static ssize_t crash__pwrite(int fd, const void *buf, size_t len, off_t off)
{
	ssize_t put;

	pthread_mutex_lock(&crash.mu);
	put = crash.plain.pwrite(fd, buf, len, off);
	if (put > 0) {
		struct crash_op *op = crash__add(CRASH_WRITE, crash.inode_of_fd[fd], NULL);

		op->off = (uint64_t)off;
		op->len = (uint64_t)put;
		op->bytes = malloc(op->len);
		crash.lost = crash.lost || !op->bytes || op->off + op->len > CRASH_MAX_LEN;
		if (op->bytes)
			memcpy(op->bytes, buf, op->len);
	}
	pthread_mutex_unlock(&crash.mu);
	return put;
}

static int crash__fallocate(int fd, int mode, off_t off, off_t len)
{
	int rc;

	pthread_mutex_lock(&crash.mu);
	rc = crash.plain.fallocate(fd, mode, off, len);
	if (rc == 0)
		crash__add(CRASH_SIZE, crash.inode_of_fd[fd], NULL)->len = (uint64_t)(off + len);
	pthread_mutex_unlock(&crash.mu);
	return rc;
}

static int crash__fdatasync(int fd)
{
	int rc;

	pthread_mutex_lock(&crash.mu);
	rc = crash.plain.fdatasync(fd);
	if (rc == 0)
		(void)crash__add(CRASH_SYNC, crash.inode_of_fd[fd], NULL);
	pthread_mutex_unlock(&crash.mu);
	return rc;
}

static int crash__fsync(int fd)
{
	int rc;

	pthread_mutex_lock(&crash.mu);
	rc = crash.plain.fsync(fd);
	if (rc == 0)
		(void)crash__add(CRASH_SYNC_DIR, -1, crash.dir_of_fd[fd]);
	pthread_mutex_unlock(&crash.mu);
	return rc;
}

static int crash__rename(int dir, const char *from, const char *to)
{
	int rc, inode;

	pthread_mutex_lock(&crash.mu);
	inode = crash__inode(crash__path(dir, from));
	rc = crash.plain.rename(dir, from, to);
	if (rc == 0) {
		struct crash_op *op = crash__add(CRASH_RENAME, inode, crash__path(dir, from));

		crash__copy(op->to, crash__path(dir, to));
	}
	crash.lost = crash.lost || inode < 0;
	pthread_mutex_unlock(&crash.mu);
	return rc;
}

static int crash__unlink(int dir, const char *name)
{
	int rc, inode;

	pthread_mutex_lock(&crash.mu);
	inode = crash__inode(crash__path(dir, name));
	rc = crash.plain.unlink(dir, name);
	if (rc == 0)
		(void)crash__add(CRASH_UNLINK, inode, crash__path(dir, name));
	pthread_mutex_unlock(&crash.mu);
	return rc;
}

/* Records a fact at its position among the calls. */
static inline void crash_note(enum crash_kind kind, const char *dir, const char *name, int value)
{
	pthread_mutex_lock(&crash.mu);
	struct crash_op *op = crash__add(kind, -1, NULL);

	crash.lost = snprintf(op->name, CRASH_PATH, "%s/%s", dir, name) >= CRASH_PATH || crash.lost;
	op->value = value;
	pthread_mutex_unlock(&crash.mu);
}

/* Starts recording, before any thread of the core runs. */
static inline void crash_record(void)
{
	crash.plain = sfr_sys;
	sfr_sys.open = crash__open;
	sfr_sys.pwrite = crash__pwrite;
	sfr_sys.fallocate = crash__fallocate;
	sfr_sys.fdatasync = crash__fdatasync;
	sfr_sys.fsync = crash__fsync;
	sfr_sys.rename = crash__rename;
	sfr_sys.unlink = crash__unlink;
}

static inline void crash_stop(void)
{
	sfr_sys = crash.plain;
	CHECK(!crash.lost);
}

static inline void crash_forget(void)
{
	for (int i = 0; i < crash.nr_ops; i++)
		free(crash.ops[i].bytes);
	crash.nr_ops = crash.nr_inodes = 0;
	crash.lost = false;
	memset(crash.memo, 0, sizeof(crash.memo));
}

#endif
