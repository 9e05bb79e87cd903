/* Names and messages of error codes, phases and states.
 *
 * Each list is an X-macro in sfr/err.h or sfr/state.h. The enums there and the tables here are made
 * from these lists, so that name, number and message always agree. For a code -errno, the C library
 * supplies name and message. */
#include <stdio.h>
#include <string.h>

#include "sfr/state.h"
#include "base/base.h"

/* glibc before 2.32 cannot name an errno; it has only the messages of strerror. */
#if __GLIBC__ * 100 + __GLIBC_MINOR__ < 232
#define strerrorname_np(err) ((err) == 0 ? "0" : NULL)
#define strerrordesc_np(err) strerror(err)
#endif

struct code_text {
	int code;
	const char *name, *message;
};

static const struct code_text codes[] = {
#define X(name, value, text) { name, #name, text },
	SFR_ERROR_LIST(X)
#undef X
};

static const char *const phases[] = {
#define X(name, text) [name] = text,
	SFR_PHASE_LIST(X)
#undef X
};

static const char *const states[] = {
#define X(name, text) [name] = text,
	SFR_STATE_LIST(X)
#undef X
};

/* Returns the entry of a code that the core defines itself, or NULL for other codes, such as
 * -errno. */
static const struct code_text *find_own_code(int code)
{
	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
		if (codes[i].code == code)
			return &codes[i];
	return NULL;
}

/* Returns a name such as "SFR_ETORN" or "EIO", or "0" for no error: static storage, never NULL. Any
 * thread may call it. */
const char *sfr_code_name(int code)
{
	const struct code_text *own = find_own_code(code);
	const char *name;

	if (own != NULL)
		return own->name;
	/* 0 is a code too. Linux has errno values up to 4095; the C library names no others. */
	name = code <= 0 && code > -4096 ? strerrorname_np(-code) : NULL;
	return name != NULL ? name : "unknown";
}

/* Returns one sentence, in static storage, never NULL. Any thread may call it, because
 * strerrordesc_np, unlike strerror, neither translates nor writes into a buffer. */
const char *sfr_code_message(int code)
{
	const struct code_text *own = find_own_code(code);
	const char *text;

	if (own != NULL)
		return own->message;
	text = code <= 0 && code > -4096 ? strerrordesc_np(-code) : NULL;
	return text != NULL ? text : "unknown error";
}

/* Returns "" for SFR_PHASE_NONE and for an invalid phase. */
const char *sfr_phase_name(enum sfr_phase phase)
{
	return (unsigned)phase < SFR_NR_PHASES ? phases[phase] : "";
}

/* Returns the text of SaveHandle.state, or "" for an invalid state. */
const char *sfr_state_name(enum sfr_state state)
{
	return (unsigned)state < SFR_NR_STATES ? states[state] : "";
}

/* Sets *err unless it already has an error: the caller needs the first failure, not those that
 * follow from it. `code` is not 0; `note` may be NULL and is cut to fit. The caller guards *err. */
void sfr__err_set(struct sfr_err *err, int code, enum sfr_phase phase, const char *note)
{
	if (err->code != 0)
		return;
	err->code = code;
	err->phase = phase;
	err->index = -1;
	(void)snprintf(err->note, sizeof(err->note), "%s", note != NULL ? note : "");
}
