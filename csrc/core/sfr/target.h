/* The target of a save. file/resolve.c resolves it. */
#ifndef SFR_TARGET_PUBLIC_H
#define SFR_TARGET_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

#define SFR_PATH_MAX 4096 /* Linux's limits */
#define SFR_NAME_MAX 255

struct sfr_target {
	char parent[SFR_PATH_MAX];   /* real path of the parent directory */
	char name[SFR_NAME_MAX + 1]; /* last component; "" for the root directory */
	uint32_t mode;     /* st_mode of what has this name (links are not followed); 0: nothing */
	uint32_t readable; /* the directory is readable; an unreadable one cannot be synced */
	uint64_t fs;       /* st_dev of the directory */
};
/* Resolves `path`, following a link in the last component if `follow_link`. Returns 0, or -errno if
 * a component is missing, is not a directory or cannot be examined. Waits for file systems. */
int sfr_resolve(const char *path, int follow_link, struct sfr_target *target);

/* Reads a small file as a string of at most `size` - 1 bytes. "" if it cannot be read. */
void sfr_read_text(const char *path, char *text, size_t size);

#endif
