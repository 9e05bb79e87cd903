/* States of a save. save/ticket.c explains them. */
#ifndef SFR_STATE_PUBLIC_H
#define SFR_STATE_PUBLIC_H

/* In the order of a save's life; the last three are final. The texts are SaveHandle.state. */
#define SFR_STATE_LIST(X)                                                                          \
	X(SFR_NEW, "staging")        /* laid out; holds nothing yet */                             \
	X(SFR_CAPTURING, "staging")  /* has a slot; the call copies captured bytes */              \
	X(SFR_STAGING, "staging")    /* in the log; a lane copies deferred bytes */                \
	X(SFR_STAGED, "staged")      /* every byte copied, both detectors passed */                \
	X(SFR_WRITING, "writing")    /* every block written; tail and sync */                      \
	X(SFR_READY, "writing")      /* synced; waits for the head of the log */                   \
	X(SFR_COMMITTING, "writing") /* being renamed: can no longer be cancelled */               \
	X(SFR_ENDING, "writing")     /* failed or cancelled; some copies or writes still run */    \
	X(SFR_DURABLE, "durable")                                                                  \
	X(SFR_FAILED, "failed")                                                                    \
	X(SFR_CANCELLED, "cancelled")

enum sfr_state {
#define X(name, text) name,
	SFR_STATE_LIST(X)
#undef X
		SFR_NR_STATES
};
const char *sfr_state_name(enum sfr_state state);

/* How the file of a save is written. */
#define SFR_IO_UNKNOWN 0u
#define SFR_IO_DIRECT 1u
#define SFR_IO_BUFFERED 2u

#endif
