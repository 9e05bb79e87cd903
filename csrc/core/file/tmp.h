/* The names of temporaries, and whether their writers live: shared by the files of this folder. */
#ifndef SFR_FILE_TMP_H
#define SFR_FILE_TMP_H

#include "file/file.h"

#define SFR__BOOT_LEN 32 /* hexadecimal digits of a boot id, without dashes */

/* The kinds of temporaries, by their names; tmp.c has the names. */
enum sfr__tmp_kind {
	SFR__TMP_FILE, /* a file, or the lock of a directory */
	SFR__TMP_NEW,  /* a directory that is being filled, or that was replaced */
	SFR__TMP_OLD,  /* a directory that was moved aside */
};

/* A temporary's name, parsed. */
struct sfr__tmp_name {
	char boot[SFR__BOOT_LEN + 1];
	intmax_t pid; /* the writer's process */
	uint64_t serial;
	enum sfr__tmp_kind kind;
	size_t len;         /* length up to and with ".tmp"; so much is the lock file's name */
	const char *target; /* SFR__TMP_OLD: the directory's former name; otherwise "" */
};

/* Parses a name into *out. Returns whether it is the name of a temporary. */
bool sfr__tmp_parse(const char *name, struct sfr__tmp_name *out);
/* Copies the id of the machine's current boot to `boot`. If the id cannot be read, copies "noboot"
 * and returns false. */
bool sfr__tmp_boot(char boot[SFR__BOOT_LEN + 1]);
/* Returns whether a save of this process is writing the temporary. */
bool sfr__tmp_is_ours(const struct sfr__tmp_name *name);

/* Whether the writer of another process's temporary is still alive. */
enum sfr__tmp_life {
	SFR__TMP_DEAD,    /* the caller has taken its lock */
	SFR__TMP_GONE,    /* the file with the lock does not exist, so the writer has ended */
	SFR__TMP_ALIVE,   /* another process has its lock */
	SFR__TMP_UNKNOWN, /* *code says why */
};
/* Finds out whether a writer lives, by trying to lock the file `name` in the open directory `dir`.
 * If the writer is dead, *fd_out is the locked descriptor, which the caller closes, else -1. *code
 * is 0 or the error. */
enum sfr__tmp_life sfr__tmp_examine(int dir, const char *name, int *fd_out, int *code);
/* Remembers a path that is about to be reported. Returns true if the path is new. When the table of
 * paths is full, always returns false, so that a process reports a limited number of paths. */
bool sfr__tmp_remember(const char *path);
/* Sends a notice that the temporary was kept, once for each path. `code` is the error that left the
 * writer's state unknown. */
void sfr__tmp_report_unknown(const char *path, int code);

#endif
