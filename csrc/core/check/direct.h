/* Reading whole pages of a file past the page cache, where that is possible. See direct.c. */
#ifndef SFR_DIRECT_H
#define SFR_DIRECT_H

#include <stddef.h>
#include <stdint.h>

/* A second descriptor of the open file, with O_DIRECT, to be closed with sfr__fd_close; -errno
 * where the file system has none. */
int sfr__direct_open(int fd);
/* All `len` bytes at `off`, a multiple of a page, as is `buf`'s address; the rest of the last page
 * may be written to. `direct_fd`: -1, or where to read first; what it refuses is read through `fd`
 * and the page cache. -errno; SFR_ECORRUPT: the file ends before. */
int sfr__direct_read(int fd, int direct_fd, char *buf, size_t len, uint64_t off);

#endif
