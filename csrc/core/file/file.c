/* The life of one file: from a temporary to a durable name.
 *
 *   1  open      the directory, for all later steps
 *                temporary in it, locked                            (tmp.c)
 *                one page written to test O_DIRECT; space reserved
 *   2  write     blocks at their offsets, from several threads at a time
 *   3  sync      cut the file to its length, because the last page may be longer
 *                fdatasync: the bytes are on the disk
 *   4  rename    over the destination: readers see old or new, nothing between
 *   5  sync      fsync of the directory: the new name is on the disk
 *   6  close     releases the lock last
 *
 * The machine may die at any moment. So this order has reasons:
 *   directory first  a directory that cannot be synced must fail the save early
 *   same directory   a rename across file systems would be a copy
 *   2 before 3       fdatasync covers only what was written before it
 *   3 before 4       a rename may reach the disk before the data it names: the
 *                    path would lead to a file of zeros, with the old one gone
 *   4 before 5       until the directory is synced the old file may come back.
 *                    Later removes rely on the new name
 *   4 before 6       an unlocked temporary counts as dead and would be removed
 * A failure before step 4 leaves the old file as it was. From step 4 on the new file is complete.
 *
 * A failed sync is final, even with EINTR. The kernel reports a write error once and then treats
 * the pages as clean, so a second fdatasync would succeed although bytes are lost.
 *
 *                open          sync           commit
 *      NAMED ───────▶ OPEN ───────▶ SYNCED ─────────▶ DONE
 *        │           write ↺           │  │
 *        │             │               │  └─────────▶ RENAMED   (directory not synced)
 *        └─────────────┴───────────────┴────────────▶ BROKEN    (old file untouched)
 *                       any state ──fini──▶ NONE
 *
 *      NONE    -> NAMED     sfr__file_init
 *      NAMED   -> OPEN      sfr__file_open
 *      OPEN    -> OPEN      sfr__file_write, even if it fails: the ticket keeps
 *                           the error, and calls fini next
 *      OPEN    -> SYNCED    sfr__file_sync (which syncs only if `durable`)
 *      SYNCED  -> DONE      sfr__file_commit
 *      SYNCED  -> RENAMED   sfr__file_commit, the last step failing
 *      NAMED, OPEN, SYNCED -> BROKEN   open, sync, commit, failing
 *      any     -> NONE      sfr__file_fini
 *
 * Only writes to a file may overlap. The caller orders other calls with the ticket's mutex. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "file/file.h"
#include "trace/trace.h"

/* Bytes per system call. Larger writes are not faster; smaller ones are slower. */
#define WRITE_BYTES (4u << 20)

static const _Alignas(SFR_PAGE) char zero_page[SFR_PAGE];

/* Sets *err, unless it has an error already. Returns `code`. */
static int fail(struct sfr_err *err, int code, enum sfr_phase phase, const char *note)
{
	sfr__err_set_if_unset(err, code, phase, note);
	return code;
}

int sfr__file_init(struct sfr__file *f, const char *dir, const char *name, uint64_t len,
		   bool durable)
{
	memset(f, 0, sizeof(*f));
	f->fd = f->dir_fd = -1;
	f->len = len;
	f->durable = durable;
	f->fork_generation = sfr_fork_generation();
	f->dir = sfr__text_copy(dir);
	f->name = sfr__text_copy(name);
	f->state = SFR__FILE_NAMED;
	if (!f->dir || !f->name) {
		sfr__file_fini(f);
		return -ENOMEM;
	}
	return 0;
}

/* ---- unanswered calls ---- */

/* Called before and after each call to the file system that may hang, so that other threads see it
 * (sfr__file_unanswered_since). */
static void note_fs_call_begun(struct sfr__file *f)
{
	atomic_store_explicit(&f->progress_ns, sfr__now_ns(), memory_order_relaxed);
	atomic_fetch_add(&f->nr_unanswered, 1);
}

static void note_fs_call_ended(struct sfr__file *f)
{
	atomic_store_explicit(&f->progress_ns, sfr__now_ns(), memory_order_relaxed);
	atomic_fetch_sub(&f->nr_unanswered, 1);
}

uint64_t sfr__file_unanswered_since(const struct sfr__file *f)
{
	if (atomic_load(&f->nr_unanswered) == 0)
		return 0;
	return atomic_load_explicit(&f->progress_ns, memory_order_relaxed);
}

/* ---- open ---- */

/* Writes through the page cache from now on. `why` completes a sentence for the save's report. */
static void go_buffered(struct sfr__file *f, const char *why)
{
	f->io_mode = SFR_IO_BUFFERED;
	(void)snprintf(f->why_buffered, sizeof(f->why_buffered),
		       "written through the page cache: %s", why);
}

/* Returns whether this write error only means that O_DIRECT does not work here. */
static bool means_no_direct(int code)
{
	return code == -EINVAL || code == -ENOTSUP || code == -ENOSYS || code == -EPERM;
}

/* Writes a page of zeros, which the first block overwrites later. Returns 0 or -errno. */
static int write_zero_page(int fd)
{
	for (int tries = 0; tries < SFR__EINTR_TRIES; tries++) {
		ssize_t put = sfr_sys.pwrite(fd, zero_page, sizeof(zero_page), 0);

		if (put >= 0) /* even a short write shows that O_DIRECT works */
			return 0;
		if (errno != EINTR)
			return -errno;
	}
	return -EINTR;
}

/* Sets io_mode to direct or buffered. Tries a real write, because some file systems accept O_DIRECT
 * but refuse the write. Returns 0 or -errno. */
static int try_direct(struct sfr__file *f)
{
	char why[96];
	int rc;

	if (f->len == 0) {
		go_buffered(f, "it is empty");
		return 0;
	}
	if (sfr_sys.set_flags(f->fd, O_DIRECT) < 0) {
		(void)snprintf(why, sizeof(why), "the file system refuses O_DIRECT (%s)",
			       sfr_code_name(-errno));
		go_buffered(f, why);
		return 0;
	}
	rc = write_zero_page(f->fd);
	if (rc == 0) {
		f->io_mode = SFR_IO_DIRECT;
		return 0;
	}
	if (!means_no_direct(rc))
		return rc;
	if (sfr_sys.set_flags(f->fd, 0) < 0)
		return -errno; /* O_DIRECT cannot be turned off, so no write would work */
	(void)snprintf(why, sizeof(why), "the file system refuses a write with O_DIRECT (%s)",
		       sfr_code_name(rc));
	go_buffered(f, why);
	return 0;
}

/* Reserves space, so that a full disk is noticed early. Not with posix_fallocate, which may write
 * the whole file. Returns 0 or -errno; 0 also if the file system cannot reserve space. */
static int reserve_space(struct sfr__file *f)
{
	int rc = -EINTR;

	if (f->len == 0)
		return 0;
	for (int tries = 0; tries < SFR__EINTR_TRIES && rc == -EINTR; tries++)
		rc = sfr_sys.fallocate(f->fd, 0, 0, (off_t)f->len) < 0 ? -errno : 0;
	if (rc == -ENOSPC || rc == -EDQUOT || rc == -EFBIG || rc == -EIO)
		return rc;
	return 0;
}

/* Opens the directory for reading only if it is synced; O_PATH also works without permission to
 * read. Returns 0 or -errno. */
static int open_directory(struct sfr__file *f)
{
	int fd = sfr__fd_open(f->dir, O_DIRECTORY | (f->durable ? O_RDONLY : O_PATH), 0);

	f->dir_fd = fd < 0 ? -1 : fd;
	return fd < 0 ? fd : 0;
}

static int run_open_steps(struct sfr__file *f, struct sfr_err *err)
{
	int rc = open_directory(f);

	if (rc < 0)
		return fail(err, rc, SFR_PHASE_OPEN,
			    f->durable ? "the directory, which a durable save reads and syncs" :
					 "the directory");
	sfr__tmp_clean_dir(f->dir_fd, f->dir);
	rc = sfr__tmp_make(f->dir_fd, &f->tmp, &f->fd, err);
	if (rc < 0)
		return rc;
	rc = try_direct(f);
	if (rc < 0)
		return fail(err, rc, SFR_PHASE_WRITE, "the first page");
	rc = reserve_space(f);
	if (rc < 0)
		return fail(err, rc, SFR_PHASE_ALLOCATE, NULL);
	return 0;
}

int sfr__file_open(struct sfr__file *f, struct sfr_err *err)
{
	int rc;

	if (f->state != SFR__FILE_NAMED)
		return fail(err, SFR_ESTATE, SFR_PHASE_OPEN, NULL);
	note_fs_call_begun(f);
	rc = run_open_steps(f, err);
	note_fs_call_ended(f);
	f->state = rc == 0 ? SFR__FILE_OPEN : SFR__FILE_BROKEN;
	return rc;
}

/* ---- write ---- */

/* Returns how many bytes of a short write of `put` bytes count as written. With O_DIRECT the next
 * write must start on a page, so a partly written page is written again. */
static size_t count_written(const struct sfr__file *f, size_t put)
{
	return f->io_mode == SFR_IO_DIRECT ? put / SFR_PAGE * SFR_PAGE : put;
}

int sfr__file_write(struct sfr__file *f, const void *buf, size_t len, uint64_t off,
		    struct sfr_err *err)
{
	const char *bytes = buf;
	int stalled = 0; /* calls in a row without progress */

	if (f->state != SFR__FILE_OPEN)
		return fail(err, SFR_ESTATE, SFR_PHASE_WRITE, NULL);
	while (len) {
		size_t chunk_len = len < WRITE_BYTES ? len : WRITE_BYTES, done;
		SFR__TRACE(SFR_TRACE_WRITE, 0, chunk_len);
		ssize_t put;
		int code;

		note_fs_call_begun(f);
		put = sfr_sys.pwrite(f->fd, bytes, chunk_len, (off_t)off);
		code = put < 0 ? -errno : -EIO; /* -EIO: used if the kernel reports no error */
		note_fs_call_ended(f);
		if (put == 0 || (put < 0 && code != -EINTR)) /* it wrote nothing, or failed */
			return fail(err, code, SFR_PHASE_WRITE, NULL);
		if (put < 0)
			done = 0; /* interrupted by a signal */
		else if ((size_t)put == chunk_len)
			done = chunk_len;
		else
			done = count_written(f, (size_t)put); /* less than a page may count as 0 */
		stalled = done ? 0 : stalled + 1;
		if (stalled == SFR__EINTR_TRIES)
			return fail(err, code, SFR_PHASE_WRITE, "no progress");
		bytes += done;
		off += done;
		len -= done;
	}
	return 0;
}

/* ---- sync and commit ---- */

/* Cuts off the padding of the last page. Returns 0 or -errno. */
static int cut_to_length(struct sfr__file *f)
{
	int rc = -EINTR;

	if (f->len % SFR_PAGE == 0)
		return 0;
	for (int tries = 0; tries < SFR__EINTR_TRIES && rc == -EINTR; tries++)
		rc = sfr_sys.ftruncate(f->fd, (off_t)f->len) < 0 ? -errno : 0;
	return rc;
}

int sfr__file_sync(struct sfr__file *f, struct sfr_err *err)
{
	int rc;

	if (f->state != SFR__FILE_OPEN)
		return fail(err, SFR_ESTATE, SFR_PHASE_SYNC, NULL);
	note_fs_call_begun(f);
	rc = cut_to_length(f);
	note_fs_call_ended(f);
	if (rc < 0) {
		f->state = SFR__FILE_BROKEN;
		return fail(err, rc, SFR_PHASE_WRITE, "cutting the last page");
	}
	SFR__TRACE(SFR_TRACE_SYNC, 0, 0);
	note_fs_call_begun(f);
	rc = f->durable && sfr_sys.fdatasync(f->fd) < 0 ? -errno : 0;
	note_fs_call_ended(f);
	if (rc < 0) {
		f->state = SFR__FILE_BROKEN; /* final: see the head of this file */
		return fail(err, rc, SFR_PHASE_SYNC, NULL);
	}
	f->state = SFR__FILE_SYNCED;
	return 0;
}

/* Returns 0 if the destination may be replaced, else -errno: -EISDIR for a directory, -EINVAL for a
 * pipe, device or socket. Not checked at the open, because an earlier entry of the log may still
 * remove the name. */
static int check_destination(const struct sfr__file *f)
{
	struct stat st;

	if (sfr_sys.lstat(f->dir_fd, f->name, &st) < 0)
		return errno == ENOENT ? 0 : -errno;
	if (S_ISREG(st.st_mode) || S_ISLNK(st.st_mode))
		return 0;
	return S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
}

/* Returns 0, or -ESTALE if the path leads to another directory than at the open: then the opened
 * directory, with the new file in it, is probably being removed. Inode numbers tell the two
 * directories apart, because both are on one file system. */
static int check_directory_not_replaced(const struct sfr__file *f)
{
	struct stat opened, at_path;

	if (sfr_sys.lstat(AT_FDCWD, f->dir, &at_path) < 0 || sfr_sys.fstat(f->dir_fd, &opened) < 0)
		return 0; /* the directory was moved: the file goes with it */
	return opened.st_ino == at_path.st_ino ? 0 : -ESTALE;
}

/* Returns 0 or -errno; 0 also if the file system cannot sync directories. */
static int sync_directory(struct sfr__file *f)
{
	SFR__TRACE(SFR_TRACE_SYNC_DIR, 0, 0);
	int rc = sfr_sys.fsync(f->dir_fd) < 0 ? -errno : 0;

	if (rc == -EINVAL || rc == -ENOTSUP || rc == -ENOSYS) {
		(void)snprintf(f->why_unsynced, sizeof(f->why_unsynced),
			       "the file system cannot sync a directory (%s): it decides when the "
			       "new name reaches the disk",
			       sfr_code_name(rc));
		return 0;
	}
	return rc;
}

int sfr__file_commit(struct sfr__file *f, struct sfr_err *err)
{
	int rc;

	if (f->state != SFR__FILE_SYNCED)
		return fail(err, SFR_ESTATE, SFR_PHASE_RENAME, NULL);
	f->state = SFR__FILE_BROKEN; /* until the rename has succeeded */
	rc = check_directory_not_replaced(f);
	if (rc == 0)
		rc = check_destination(f);
	if (rc == 0)
		rc = sfr_sys.rename(f->dir_fd, f->tmp.name, f->name) < 0 ? -errno : 0;
	if (rc == -EINVAL)
		return fail(err, rc, SFR_PHASE_RENAME, "the path is not a regular file");
	if (rc == -ESTALE)
		return fail(err, rc, SFR_PHASE_RENAME, "its directory was replaced meanwhile");
	if (rc < 0)
		return fail(err, rc, SFR_PHASE_RENAME, NULL);

	f->renamed = true;
	f->state = SFR__FILE_RENAMED;
	if (f->durable) {
		rc = sync_directory(f);
		if (rc < 0)
			return fail(err, rc, SFR_PHASE_SYNC_DIR, NULL);
	} else {
		/* Without a sync, a network file system may report a full disk only here. */
		rc = sfr__fd_close(f->fd);
		f->fd = -1;
		if (rc < 0)
			return fail(err, rc, SFR_PHASE_WRITE, "on closing the new file");
	}
	f->state = SFR__FILE_DONE;
	return 0;
}

void sfr__file_fini(struct sfr__file *f)
{
	/* In a forked child the temporary is the parent's, and the descriptors are closed. */
	bool ours = f->state != SFR__FILE_NONE && f->fork_generation == sfr_fork_generation();

	note_fs_call_begun(f);
	if (ours && f->tmp.serial && !f->renamed)
		/* if this fails, the next save removes it */
		(void)sfr_sys.unlink(f->dir_fd, f->tmp.name);
	if (ours)
		sfr__tmp_unlist(&f->tmp);
	if (ours && f->fd >= 0)
		(void)sfr__fd_close(f->fd); /* synced or discarded: nothing can be lost */
	if (ours && f->dir_fd >= 0)
		(void)sfr__fd_close(f->dir_fd); /* fsync has already reported any error */
	note_fs_call_ended(f);
	sfr_sys.free(f->name);
	sfr_sys.free(f->dir);
	f->name = f->dir = NULL;
	f->fd = f->dir_fd = -1;
	f->state = SFR__FILE_NONE;
}
