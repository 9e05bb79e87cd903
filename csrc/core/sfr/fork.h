/* Forks. See base/fork.c. */
#ifndef SFR_FORK_PUBLIC_H
#define SFR_FORK_PUBLIC_H

#include <stdint.h>

/* Installs the fork handlers, once per process; every sfr_engine_new calls it. */
int sfr_fork_init(void);
/* Counts the forks between the first process and this one: objects remember it. */
uint64_t sfr_fork_generation(void);

#endif
