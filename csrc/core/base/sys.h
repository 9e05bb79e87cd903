/* The system-call table: the core's only way to the operating system.
 *
 * Every file, memory, thread and clock call of the core goes through `sfr_sys`. So a test can make
 * any of them fail, transfer fewer bytes or be slow (inject.c). An entry reports errors like the C
 * library's function: -1 and errno, NULL and errno, or (pthread functions) an error number. */
#ifndef SFR_SYS_H
#define SFR_SYS_H

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

struct sfr_sys {
	/* files; names are relative to the open directory `dir`, which may be AT_FDCWD */
	int (*open)(int dir, const char *name, int flags, mode_t mode);
	int (*close)(int fd);
	ssize_t (*pread)(int fd, void *buf, size_t len, off_t off);
	ssize_t (*pwrite)(int fd, const void *buf, size_t len, off_t off);
	int (*fdatasync)(int fd);
	int (*fsync)(int fd);
	int (*fallocate)(int fd, int mode, off_t off, off_t len);
	int (*ftruncate)(int fd, off_t len);
	int (*flock)(int fd, int op);
	int (*set_flags)(int fd, int flags); /* fcntl(F_SETFL) */
	int (*fstat)(int fd, struct stat *st);
	int (*lstat)(int dir, const char *name, struct stat *st);
	char *(*realpath)(const char *path, char *real);
	int (*faccessat)(int dir, const char *path, int mode, int flags);
	int (*mkdir)(int dir, const char *name, mode_t mode);
	int (*rename)(int dir, const char *from, const char *to);
	int (*exchange)(int dir, const char *one, const char *other); /* swaps two names */
	int (*unlink)(int dir, const char *name);
	int (*rmdir)(const char *path);
	DIR *(*opendir)(const char *path);
	struct dirent *(*readdir)(DIR *dir);
	int (*closedir)(DIR *dir);
	/* memory */
	int (*memfd)(const char *name, unsigned flags); /* memfd_create */
	void *(*mmap)(void *addr, size_t len, int prot, int flags, int fd, off_t off);
	int (*munmap)(void *addr, size_t len);
	int (*mprotect)(void *addr, size_t len, int prot);
	int (*madvise)(void *addr, size_t len, int advice);
	int (*mincore)(void *addr, size_t len, unsigned char *vec);
	int (*get_limit)(int resource, struct rlimit *limit); /* getrlimit */
	void *(*malloc)(size_t len);
	void *(*calloc)(size_t nr, size_t len);
	void *(*realloc)(void *old, size_t len);
	void (*free)(void *mem);
	/* threads and time */
	int (*thread_create)(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
			     void *arg);
	int (*thread_join)(pthread_t thread, void **value);
	/* the next three change the calling thread */
	int (*set_nice)(int nice);
	int (*set_slack)(unsigned long ns); /* how late the kernel may wake the thread */
	int (*set_affinity)(const cpu_set_t *cpus);
	int (*clock_gettime)(clockid_t clock, struct timespec *ts);
	/* copies of tensors that a call or a step waits for */
	void (*capture_copy)(void *dst, const void *src, size_t len);
	/* other copies of tensors; returns `crc` extended by the copied bytes */
	uint32_t (*lane_copy)(uint32_t crc, void *dst, const void *src, size_t len);
};

extern struct sfr_sys sfr_sys;

/* ---- fault injection (inject.c): tests only; nothing in the product installs it ---- */

struct sfr_fault {
	const char *call; /* name in struct sfr_sys, e.g. "pwrite"; "*": any call that can fail */
	uint64_t nth;     /* acts on the nth call from now on, counted from 1 */
	int sticky;       /* acts on every later call too */
	int err;          /* errno of the failure; 0: the call does not fail */
	/* pread, pwrite: the most bytes to transfer; -1: all, -2: half, -3: all but one */
	int64_t limit;
	uint64_t delay_ns; /* the call first sleeps; SFR_FOREVER: until the fault is removed */
};
/* Puts counting wrappers into sfr_sys; a second call does nothing. Returns 0. No other thread may
 * be inside the core during this call or sfr_inject_uninstall. */
int sfr_inject_install(void);
/* Adds a fault; the first that is due wins. Returns 0, or:
 *   -EINVAL  an unknown call, nth 0, or an error for a call that can only be slow (free, readdir,
 *            closedir, thread_join, clock_gettime, capture_copy, lane_copy)
 *   -ENOSPC  there are 16 faults already */
int sfr_inject_add_fault(const struct sfr_fault *fault);
/* Removes one fault that equals *fault; the counters stay. Returns 0, or -ENOENT if there is
 * none. */
int sfr_inject_remove_fault(const struct sfr_fault *fault);
/* Removes all faults and resets the counters. */
void sfr_inject_clear(void);
/* Returns how often the entry of this name was called since the last clear; 0 for an unknown name.
 * "*" stands for all entries that can fail. */
uint64_t sfr_inject_count_calls(const char *call);
/* Returns how often a fault acted on a call since the last clear. */
uint64_t sfr_inject_hits(void);
/* Restores the plain table. */
void sfr_inject_uninstall(void);

#endif
