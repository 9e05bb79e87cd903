/* Reads whole pages of a file past the page cache, where that is possible. See direct.c. */
#ifndef SFR_DIRECT_H
#define SFR_DIRECT_H

#include <stddef.h>
#include <stdint.h>

/* Opens the open file again with O_DIRECT; close the result with sfr__fd_close. -errno if the file
 * system does not support it. */
int sfr__direct_open(int fd);
/* Reads `len` bytes at `off`. `off` and the address `buf` are multiples of a page, and the rest of
 * the last page may be written to. direct_fd is tried first, unless it is -1; what it refuses is
 * read through `fd` and the page cache. -errno, or SFR_ECORRUPT if the file ends before. */
int sfr__direct_read(int fd, int direct_fd, char *buf, size_t len, uint64_t off);

#endif
