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

struct sfr__tmp_name {
	char boot[SFR__BOOT_LEN + 1];
	intmax_t pid;
	uint64_t serial;
	enum sfr__tmp_kind kind;
	size_t len;         /* of the name of the file that carries the lock */
	const char *target; /* of a directory that was moved aside: its name before; else "" */
};

/* Returns whether the name has exactly the format of a temporary's. */
bool sfr__tmp_parse(const char *name, struct sfr__tmp_name *out);
/* Gets this boot's id; false and "noboot" if there is none. */
bool sfr__tmp_boot(char boot[SFR__BOOT_LEN + 1]);
/* Returns whether a save of this process is writing the temporary. */
bool sfr__tmp_is_ours(const struct sfr__tmp_name *name);

/* Whether the writer of another process's temporary is still alive. */
enum sfr__tmp_life {
	SFR__TMP_DEAD,    /* the caller has its lock */
	SFR__TMP_GONE,    /* there is no such lock (any more), so its writer has ended */
	SFR__TMP_ALIVE,   /* another process has its lock */
	SFR__TMP_UNKNOWN, /* *code says why */
};
/* Tries the lock of the file `name` in the open directory `dir`. *fd_out is the locked descriptor
 * if the writer is dead, else -1. */
enum sfr__tmp_life sfr__tmp_examine(int dir, const char *name, int *fd_out, int *code);
/* Returns true the first time it is called with a path, as long as there is room to remember. */
bool sfr__tmp_first_time(const char *path);
/* Sends a notice that the temporary was kept, once for each path. */
void sfr__tmp_report_unknown(const char *path, int code);

#endif
