/* Temporaries: their names, their locks, and how to tell dead ones from live ones.
 *
 * A save writes to a temporary next to its destination. If its process dies, the next save into the
 * directory removes the temporary (clean.c). A temporary whose writer is alive must never be
 * removed. Three things together show whether the writer is alive:
 *
 *   the name   .stillframe-<boot id>-<pid>-<serial>.tmp
 *              Locks and pids mean something only in one boot of one machine. A
 *              temporary of another boot is only named in a notice, because its
 *              writer may live on another machine.
 *   the lock   flock, which the writer holds until after the rename. The kernel
 *              releases it when the process ends.
 *   the list   of this process's own temporaries, entered before the file exists.
 *              It covers the moment between open and flock, and file systems
 *              without flock.
 *
 * A temporary may also be a directory (folder.c). Not every file system can lock a directory, so a
 * file carries the lock. The file is made before the directories and removed after them:
 *
 *   .stillframe-...tmp            the lock
 *   .stillframe-...tmp.d          the new directory; once exchanged, the old one
 *   .stillframe-...tmp.old-NAME   the old directory NAME, if names cannot be exchanged
 *
 * Between a writer's open and its flock, a cleaner in another process may take the lock and unlink
 * the file. So each side checks again once it has the lock:
 *
 *   writer    open(O_EXCL)  flock  links > 0 and path is this inode?  no: tries another name
 *   cleaner   open          flock  links > 0 and path is this inode?  no: leaves the file alone
 *                                                                     yes: unlinks the file
 *
 * A process never uses a name twice, so the cleaner unlinks exactly the file that it has locked.
 *
 * A temporary is dead if this process could take its lock, or if the file with the lock is gone. If
 * the lock cannot be tried (no flock, descriptor or permission), the temporary is kept, and a
 * notice names it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "file/tmp.h"

/* the components of a name */
#define PREFIX ".stillframe-"
#define SUFFIX ".tmp"
#define NEW_ENDING ".d"
#define OLD_ENDING ".old-"
#define NO_BOOT "noboot"
#define BOOT_ID_PATH "/proc/sys/kernel/random/boot_id"
#define BOOT_LEN SFR__BOOT_LEN
#define NR_TRIES 64      /* names tried before giving up */
#define MAX_REPORTED 256 /* the most paths that a process reports */

static struct {
	struct sfr__mutex mu;  /* guards everything here; no system call under it */
	struct sfr__tmp *live; /* this process's temporaries */
	uint64_t last_serial;
	char boot_id[BOOT_LEN + 1];
	atomic_bool boot_known; /* set last: a forked child may find `boot_id` half written */
	uint64_t reported[MAX_REPORTED]; /* hashes of the paths that were reported */
	unsigned nr_reported;
} temps = { .mu = SFR__MUTEX(SFR__LOCK_TMP) };

/* Runs in a forked child. */
static void reset_in_child(void)
{
	temps.live = NULL; /* the parent writes these files */
	sfr__mutex_init(&temps.mu, SFR__LOCK_TMP);
}
SFR__AT_FORK(reset_in_child)

/* ---- names ---- */

/* Reads the boot id into `boot_id`, without dashes or final zero. Returns false after an error. */
static bool read_boot_id(char boot_id[BOOT_LEN])
{
	char text[64];
	ssize_t got;
	size_t nr = 0;
	int fd = sfr__fd_open(BOOT_ID_PATH, O_RDONLY, 0);

	if (fd < 0)
		return false;
	got = sfr_sys.pread(fd, text, sizeof(text), 0);
	(void)sfr__fd_close(fd); /* nothing to lose: it was only read */
	for (ssize_t i = 0; i < got && nr < BOOT_LEN; i++) {
		if (strchr("0123456789abcdef", text[i]) && text[i]) /* strchr also finds 0 */
			boot_id[nr++] = text[i];
		else if (text[i] != '-')
			break;
	}
	return nr == BOOT_LEN;
}

/* After a failure the next call tries again. */
bool sfr__tmp_get_boot_id(char boot_id[BOOT_LEN + 1])
{
	if (!atomic_load(&temps.boot_known)) {
		if (!read_boot_id(boot_id)) {
			memcpy(boot_id, NO_BOOT, sizeof(NO_BOOT));
			return false;
		}
		sfr__lock(&temps.mu);
		memcpy(temps.boot_id, boot_id, BOOT_LEN); /* the last byte of temps.boot_id is 0 */
		atomic_store(&temps.boot_known, true);
		sfr__unlock(&temps.mu);
	}
	sfr__lock(&temps.mu);
	memcpy(boot_id, temps.boot_id, BOOT_LEN + 1);
	sfr__unlock(&temps.mu);
	return true;
}

/* Parses `rest`, what follows ".tmp" in a name. Returns false if the name is not a temporary's. */
static bool parse_kind(const char *rest, struct sfr__tmp_name *out)
{
	if (strncmp(rest, OLD_ENDING, sizeof(OLD_ENDING) - 1) == 0) {
		out->kind = SFR__TMP_OLD;
		out->former_name = rest + sizeof(OLD_ENDING) - 1;
		return *out->former_name != '\0';
	}
	out->former_name = "";
	if (*rest == '\0') {
		out->kind = SFR__TMP_FILE;
		return true;
	}
	out->kind = SFR__TMP_NEW;
	return strcmp(rest, NEW_ENDING) == 0;
}

/* sscanf also accepts signs and leading zeros. So the name is rebuilt from what was parsed, and the
 * two names are compared. */
bool sfr__tmp_parse(const char *name, struct sfr__tmp_name *out)
{
	char rebuilt[SFR__TMP_NAME_LEN];
	size_t len;

	if (strncmp(name, PREFIX, sizeof(PREFIX) - 1) != 0)
		return false;
	if (sscanf(name + sizeof(PREFIX) - 1, "%32[0-9a-z]-%" SCNdMAX "-%" SCNu64, out->boot_id,
		   &out->pid, &out->serial) != 3)
		return false;
	len = (size_t)snprintf(rebuilt, sizeof(rebuilt), PREFIX "%s-%" PRIdMAX "-%" PRIu64 SUFFIX,
			       out->boot_id, out->pid, out->serial);
	out->lock_name_len = len;
	return strncmp(name, rebuilt, len) == 0 && parse_kind(name + len, out);
}

/* ---- the list of live temporaries ---- */

static void add_to_live_list(struct sfr__tmp *tmp)
{
	sfr__lock(&temps.mu);
	tmp->serial = ++temps.last_serial;
	tmp->next = temps.live;
	temps.live = tmp;
	sfr__unlock(&temps.mu);
}

void sfr__tmp_unlist(struct sfr__tmp *tmp)
{
	sfr__lock(&temps.mu);
	for (struct sfr__tmp **p = &temps.live; *p; p = &(*p)->next) {
		if (*p == tmp) {
			*p = tmp->next;
			break;
		}
	}
	tmp->serial = 0;
	sfr__unlock(&temps.mu);
}

bool sfr__tmp_is_ours(const struct sfr__tmp_name *parsed)
{
	bool found = false;

	if (parsed->pid != (intmax_t)getpid())
		return false;
	sfr__lock(&temps.mu);
	for (const struct sfr__tmp *tmp = temps.live; tmp && !found; tmp = tmp->next)
		found = tmp->serial == parsed->serial;
	sfr__unlock(&temps.mu);
	return found;
}

/* ---- locks ---- */

/* Returns 0, -errno, or SFR_EAGAIN if another process has the lock. */
static int try_lock(int fd)
{
	for (int tries = 0; tries < SFR__EINTR_TRIES; tries++) {
		if (sfr_sys.flock(fd, LOCK_EX | LOCK_NB) == 0)
			return 0;
		if (errno == EWOULDBLOCK)
			return SFR_EAGAIN;
		if (errno != EINTR)
			return -errno;
	}
	return -EINTR;
}

/* Returns whether this error of flock means that the file system has no locks. */
static bool means_no_locks(int code)
{
	return code == -ENOLCK || code == -ENOTSUP || code == -ENOSYS;
}

/* Checks that the name still leads to the locked file. Returns 0, -ENOENT if not, or -errno. */
static int check_name_leads_to_fd(int fd, int dir, const char *name)
{
	struct stat locked, named;

	if (sfr_sys.fstat(fd, &locked) < 0)
		return -errno;
	if (locked.st_nlink == 0)
		return -ENOENT;
	if (sfr_sys.lstat(dir, name, &named) < 0)
		return -errno;
	return locked.st_dev == named.st_dev && locked.st_ino == named.st_ino ? 0 : -ENOENT;
}

/* Opens a temporary for writing if possible, because NFS refuses flock on a read-only descriptor.
 * Returns the descriptor or -errno. */
static int open_existing(int dir, const char *name)
{
	/* the name may lead to a link by now, or to a pipe, whose open would wait */
	const int flags = O_NOFOLLOW | O_NONBLOCK;
	int fd = sfr__fd_openat(dir, name, O_RDWR | flags, 0);

	if (fd == -EACCES || fd == -EPERM || fd == -EROFS)
		fd = sfr__fd_openat(dir, name, O_RDONLY | flags, 0);
	return fd;
}

enum sfr__tmp_writer_state sfr__tmp_lock_if_dead(int dir, const char *name, int *fd_out, int *code)
{
	struct stat st;
	int fd = open_existing(dir, name), rc;

	*fd_out = -1;
	if (fd < 0)
		rc = fd;
	else if (sfr_sys.fstat(fd, &st) < 0)
		rc = -errno;
	else
		rc = S_ISREG(st.st_mode) ? 0 : -ENOENT; /* only regular files are locks */
	if (rc == 0)
		rc = try_lock(fd);
	if (rc == 0)
		rc = check_name_leads_to_fd(fd, dir, name);
	*code = rc;
	if (rc == 0) {
		*fd_out = fd;
		return SFR__TMP_DEAD;
	}
	if (fd >= 0)
		(void)sfr__fd_close(fd); /* nothing was written to it */
	switch (rc) {
	case SFR_EAGAIN:
		return SFR__TMP_ALIVE;
	case -ENOENT:
	case -ELOOP: /* a link, a directory or a device is not a temporary */
	case -EISDIR:
	case -ENXIO:
		return SFR__TMP_GONE;
	default:
		return SFR__TMP_UNKNOWN;
	}
}

bool sfr__tmp_mark_reported(const char *path)
{
	uint64_t hash = 14695981039346656037u; /* FNV-1a */
	bool is_new = true;

	for (const char *p = path; *p; p++)
		hash = (hash ^ (unsigned char)*p) * 1099511628211u;
	sfr__lock(&temps.mu);
	for (unsigned i = 0; i < temps.nr_reported && is_new; i++)
		is_new = temps.reported[i] != hash;
	is_new = is_new && temps.nr_reported < MAX_REPORTED; /* a full table ends the reports */
	if (is_new)
		temps.reported[temps.nr_reported++] = hash;
	sfr__unlock(&temps.mu);
	return is_new;
}

void sfr__tmp_report_unknown(const char *path, int code)
{
	if (sfr__tmp_mark_reported(path))
		sfr__notice_post_text("%s is a temporary file whose writer may still be running "
				      "(%s): it was kept",
				      path, sfr_code_name(code));
}

bool sfr__tmp_may_be_live(const char *path, const char *name)
{
	struct sfr__tmp_name parsed;
	char lock_path[SFR_PATH_MAX];
	enum sfr__tmp_writer_state life;
	int fd, code;
	size_t len;

	if (!sfr__tmp_parse(name, &parsed))
		return false;
	if (sfr__tmp_is_ours(&parsed))
		return true;
	/* the path up to and including ".tmp" is that of the lock file */
	len = strlen(path) - strlen(name) + parsed.lock_name_len;
	if (len >= sizeof(lock_path))
		return true; /* too long to be examined */
	memcpy(lock_path, path, len);
	lock_path[len] = '\0';
	life = sfr__tmp_lock_if_dead(AT_FDCWD, lock_path, &fd, &code);
	if (fd >= 0)
		(void)sfr__fd_close(fd); /* nothing was written to it */
	if (life == SFR__TMP_UNKNOWN)
		sfr__tmp_report_unknown(path, code);
	return life == SFR__TMP_ALIVE || life == SFR__TMP_UNKNOWN;
}

/* ---- making a temporary ---- */

/* Makes and locks a temporary under a new name. Returns 0, SFR_EAGAIN if the caller must try again,
 * or -errno. *phase is the step that failed. */
static int try_to_make_tmp(int dir, const char *boot_id, struct sfr__tmp *tmp, int *fd_out,
			   enum sfr_phase *phase)
{
	int fd, rc;

	*phase = SFR_PHASE_OPEN;
	add_to_live_list(tmp);
	(void)snprintf(tmp->name, sizeof(tmp->name), PREFIX "%s-%" PRIdMAX "-%" PRIu64 SUFFIX,
		       boot_id, (intmax_t)getpid(), tmp->serial); /* tmp->name is long enough */
	/* subject to the umask, like any file */
	fd = sfr__fd_openat(dir, tmp->name, O_WRONLY | O_CREAT | O_EXCL, 0666);
	if (fd < 0) {
		sfr__tmp_unlist(tmp);
		return fd == -EEXIST ? SFR_EAGAIN : fd;
	}
	*phase = SFR_PHASE_LOCK;
	rc = try_lock(fd);
	if (rc == 0 || means_no_locks(rc)) /* without locks the list protects the file */
		rc = check_name_leads_to_fd(fd, dir, tmp->name);
	if (rc == 0) {
		*fd_out = fd;
		return 0;
	}
	/* A cleaner may have unlinked the file already. No other file has this name. */
	(void)sfr_sys.unlink(dir, tmp->name);
	sfr__tmp_unlist(tmp);
	(void)sfr__fd_close(fd);                /* nothing was written */
	return rc == -ENOENT ? SFR_EAGAIN : rc; /* -ENOENT: a cleaner was first */
}

int sfr__tmp_make(int dir, struct sfr__tmp *tmp, int *fd_out, struct sfr_err *err)
{
	enum sfr_phase phase = SFR_PHASE_OPEN;
	char boot_id[BOOT_LEN + 1];
	int rc = SFR_EAGAIN;

	(void)sfr__tmp_get_boot_id(boot_id); /* "noboot" is good enough for a name */
	for (int tries = 0; tries < NR_TRIES && rc == SFR_EAGAIN; tries++)
		rc = try_to_make_tmp(dir, boot_id, tmp, fd_out, &phase);
	/* the last name was in use (OPEN), or cleaners locked or removed the files (LOCK) */
	if (rc == SFR_EAGAIN)
		rc = phase == SFR_PHASE_OPEN ? -EEXIST : -EWOULDBLOCK;
	if (rc < 0)
		sfr__err_set_if_unset(err, rc, phase, "the temporary file next to the destination");
	return rc;
}
