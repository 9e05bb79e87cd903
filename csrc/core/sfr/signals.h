/* Signals in forked workers. See base/signals.c. */
#ifndef SFR_SIGNALS_H
#define SFR_SIGNALS_H

#include <stdbool.h>

/* Makes this process leave a signal to its parent: it ignores the signal while the parent lives,
 * unless the parent itself sends it. The action that was in place handles all other deliveries.
 * Returns 0, or -errno: -EINVAL if `signum` is no signal or cannot be handled. May be called again
 * after other code has replaced the handler; one thread at a time may call it.
 *
 * The signal will not come again, so the kernel ends a process that has ignored it: it kills the
 * process when the thread that forked it ends. If the main thread forked, that is the end of the
 * parent. With `at_once` this holds from now on, even before a signal is ignored. */
int sfr_signals_leave(int signum, bool at_once);

#endif
