/* Errors: codes, phases and the first error of a save. base/err.c implements it. */
#ifndef SFR_ERR_PUBLIC_H
#define SFR_ERR_PUBLIC_H

#include <stdint.h>

#define SFR_FOREVER UINT64_MAX /* as a slice: wait without bound */

/* The enum and the tables of names and messages are made from this one list. */
#define SFR_ERROR_LIST(X)                                                                          \
	X(SFR_EAGAIN, -1001, "the wait's time slice has passed")                                   \
	X(SFR_EBUSY, -1002, "as many saves are in flight as max_in_flight allows")                 \
	X(SFR_ECLOSED, -1003, "the engine is closed")                                              \
	X(SFR_EFORK, -1004, "the object belongs to the process that forked this one")              \
	X(SFR_ETORN, -1005, "a tensor changed between the call and its copy")                      \
	X(SFR_ECANCELLED, -1006, "the save was cancelled")                                         \
	X(SFR_ECORRUPT, -1007, "the file is damaged")                                              \
	X(SFR_EEXHAUSTED, -1008, "snapshots hold the memory that this call needs")                 \
	X(SFR_ESTATE, -1009, "the call does not fit the save's state")                             \
	X(SFR_ECAPTURING, -1010,                                                                   \
	  "a CUDA graph is being captured on the current stream: nothing can be saved until "      \
	  "it ends")                                                                               \
	X(SFR_EUNPLACED, -1011,                                                                    \
	  "a record was waited for before it and its neighbours had their memory")

enum sfr_code {
#define X(name, value, text) name = value,
	SFR_ERROR_LIST(X)
#undef X
};

/* The phase in which a save failed. The texts are those of SaveError.phase. */
#define SFR_PHASE_LIST(X)                                                                          \
	X(SFR_PHASE_NONE, "")                                                                      \
	X(SFR_PHASE_STAGE, "stage")                                                                \
	X(SFR_PHASE_OPEN, "open")                                                                  \
	X(SFR_PHASE_LOCK, "lock")                                                                  \
	X(SFR_PHASE_ALLOCATE, "allocate")                                                          \
	X(SFR_PHASE_WRITE, "write")                                                                \
	X(SFR_PHASE_SYNC, "sync")                                                                  \
	X(SFR_PHASE_RENAME, "rename")                                                              \
	X(SFR_PHASE_SYNC_DIR, "sync directory")                                                    \
	X(SFR_PHASE_REMOVE, "remove")

enum sfr_phase {
#define X(name, text) name,
	SFR_PHASE_LIST(X)
#undef X
		SFR_NR_PHASES
};

/* The first error of a save or snapshot; later errors do not replace it. */
struct sfr_err {
	int code;             /* 0, -errno or SFR_E* */
	enum sfr_phase phase; /* what was being done */
	int64_t index;        /* index of the torn source, or -1 */
	char note[160];       /* one more fact about the error, or "" */
};

const char *sfr_code_name(int code);    /* such as "SFR_ETORN" or "EIO"; never NULL */
const char *sfr_code_message(int code); /* never NULL */
const char *sfr_phase_name(enum sfr_phase phase);

#endif
