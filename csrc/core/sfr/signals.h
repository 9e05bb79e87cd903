/* Signals in forked workers. See base/signals.c. */
#ifndef SFR_SIGNALS_H
#define SFR_SIGNALS_H

/* Makes this process leave a signal to its parent: it ignores the signal while the parent lives,
 * unless the parent itself sends it. The action that was in place handles all other deliveries.
 * Returns 0, or -errno: -EINVAL if `signum` is no signal or cannot be handled. May be called again
 * after other code has replaced the handler. Async-signal-safe are only the handler's calls: one
 * thread at a time may call this. */
int sfr_signals_leave(int signum);

#endif
