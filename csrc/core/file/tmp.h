/* The names of temporaries, and whether their writers live. Used only in this folder. */
#ifndef SFR_FILE_TMP_H
#define SFR_FILE_TMP_H

#include "file/file.h"

#define SFR__BOOT_LEN 32 /* hexadecimal digits of a boot id, without dashes */

/* The kinds of temporaries. tmp.c shows their names. */
enum sfr__tmp_kind {
	SFR__TMP_FILE, /* a file, or the lock of a directory */
	SFR__TMP_NEW,  /* a directory that is being filled, or that was replaced */
	SFR__TMP_OLD,  /* a directory that was moved aside */
};

/* A temporary's name, parsed. */
struct sfr__tmp_name {
	char boot_id[SFR__BOOT_LEN + 1];
	intmax_t pid; /* the writer's process */
	uint64_t serial;
	enum sfr__tmp_kind kind;
	size_t lock_name_len;    /* the lock file's name: this name up to and including ".tmp" */
	const char *former_name; /* of a directory that was moved aside; else "" */
};

/* Returns whether `name` is the name of a temporary, and parses it. */
bool sfr__tmp_parse(const char *name, struct sfr__tmp_name *out);
/* Gets the id of the current boot. If it cannot be read, gets "noboot" and returns false. */
bool sfr__tmp_get_boot_id(char boot_id[SFR__BOOT_LEN + 1]);
/* Returns whether a save of this process is writing the temporary. */
bool sfr__tmp_is_ours(const struct sfr__tmp_name *name);

/* The state of a writer in another process, as far as it is known. */
enum sfr__tmp_writer_state {
	SFR__TMP_DEAD,    /* nobody had the lock; the caller has it now */
	SFR__TMP_GONE,    /* the file with the lock does not exist, so the writer has ended */
	SFR__TMP_ALIVE,   /* another process has the lock */
	SFR__TMP_UNKNOWN, /* the lock could not be tried */
};
/* Tries to lock the file `name` in the open directory `dir`. For SFR__TMP_DEAD, *fd_out is the
 * locked descriptor, which the caller closes; else it is -1. *code is 0, or the error that led to
 * the result. */
enum sfr__tmp_writer_state sfr__tmp_lock_if_dead(int dir, const char *name, int *fd_out, int *code);
/* Marks a path as reported. Returns false if it was reported before, or if too many paths were. */
bool sfr__tmp_mark_reported(const char *path);
/* Sends a notice, once for each path, that the temporary was kept because of the error `code`. */
void sfr__tmp_report_unknown(const char *path, int code);

#endif
