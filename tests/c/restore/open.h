/* Opens a restore of a file, for its tests. */
#ifndef OPEN_H
#define OPEN_H

#include "check/verdict.h"
#include "reader/reader_int.h"
#include "restore/restore.h"
#include "restore/restore_int.h"

/* Returns NULL with *rc set if the restore is refused. */
static inline struct sfr_restore *open_restore(int fd, unsigned flags, int *rc)
{
	struct sfr_restore *r = NULL;
	struct sfr_check *check;

	*rc = sfr_check_new(fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &check);
	if (*rc != 0)
		return NULL;
	*rc = sfr_check_run(check, SFR_FOREVER);
	if (*rc == 0 && !sfr_check_result(check)->ok)
		*rc = SFR_ECORRUPT;
	if (*rc != 0)
		sfr_check_free(check);
	else
		*rc = sfr_restore_new(check, fd, flags, &r);
	return r;
}

#endif
