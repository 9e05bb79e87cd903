/* Signals in forked workers. See base/signals.c. */
#ifndef SFR_SIGNALS_H
#define SFR_SIGNALS_H

#include <stdbool.h>

/* Makes this process leave a signal to its parent: it ignores the signal while the parent lives,
 * unless the parent itself sends it. The action that was in place handles all other deliveries.
 * Returns 0, or -errno: -EINVAL if `signum` is no signal or cannot be handled. May be called again
 * after other code has replaced the handler; one thread at a time may call it.
 *
 * The process is killed when the thread that forked it ends: from the first signal on that it has
 * ignored, or from now on if `at_once`. That is the end of the parent if its main thread forked. */
int sfr_signals_leave(int signum, bool at_once);

#endif
