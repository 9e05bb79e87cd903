/* Signals in forked workers. See base/signals.c. */
#ifndef SFR_SIGNALS_H
#define SFR_SIGNALS_H

#include <stdbool.h>

/* Makes this process leave a signal to its parent. It ignores the signal while the parent lives,
 * unless the parent itself has sent it. The former action handles all other deliveries. Returns 0
 * or -errno; -EINVAL if `signum` is no signal or cannot be handled. May be called again after other
 * code has replaced the handler. One thread at a time may call it.
 *
 * Nobody sends an ignored signal a second time. So after this process has ignored a signal, the
 * kernel kills it when the thread that forked it ends (PR_SET_PDEATHSIG). With `at_once` the kernel
 * does so from now on, without a signal. */
int sfr_signals_leave_to_parent(int signum, bool at_once);

#endif
