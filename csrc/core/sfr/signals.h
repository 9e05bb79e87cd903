/* Signals in forked workers. See base/signals.c. */
#ifndef SFR_SIGNALS_H
#define SFR_SIGNALS_H

#include <stdbool.h>

/* Makes this process leave a signal to its parent: it ignores the signal while the parent lives,
 * unless the parent itself sends it. The action that was in place handles all other deliveries.
 * Returns 0, or -errno: -EINVAL if `signum` is no signal or cannot be handled. May be called again
 * after other code has replaced the handler; one thread at a time may call it.
 *
 * A signal that was ignored does not come again. So after the first, the kernel kills this process
 * when the thread that forked it ends (PR_SET_PDEATHSIG). If the main thread forked it, that is
 * when the parent ends. With `at_once` the kernel does so from now on, before any signal. */
int sfr_signals_leave(int signum, bool at_once);

#endif
