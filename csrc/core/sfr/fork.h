/* Forks of the process. base/fork.c implements it. */
#ifndef SFR_FORK_PUBLIC_H
#define SFR_FORK_PUBLIC_H

#include <stdint.h>

/* Installs the fork handlers once per process; sfr_engine_new calls it. Returns 0 or -errno. */
int sfr_fork_init(void);
/* Returns the number of forks between the first process and this one. An object stores the number
 * when it is made. If it differs later, the object belongs to a parent of this process. */
uint64_t sfr_fork_generation(void);

#endif
