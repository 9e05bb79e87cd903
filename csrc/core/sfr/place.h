/* Where a save goes. See file/look.c. */
#ifndef SFR_PLACE_PUBLIC_H
#define SFR_PLACE_PUBLIC_H

#include <stdint.h>

#define SFR_PATH_MAX 4096 /* of Linux */
#define SFR_NAME_MAX 255

struct sfr_place {
	char parent[SFR_PATH_MAX];   /* real path of the directory */
	char name[SFR_NAME_MAX + 1]; /* last component; "" for the root */
	uint32_t mode;     /* of what stands there (st_mode; links are not followed), or 0 */
	uint32_t readable; /* the directory: what may not be read cannot be synced */
	uint64_t fs;       /* of the directory: st_dev */
};
/* Finds out where `path` leads, with a link in its last component followed or not. 0, or -errno: some
 * part of the path is missing, is no directory, or cannot be looked at. Blocks on file systems. */
int sfr_look(const char *path, int follow_link, struct sfr_place *place);

#endif
