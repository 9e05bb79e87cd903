/* Names and messages of error codes, phases and states.
 *
 * The tables here and the enums in sfr/err.h and sfr/state.h are made from the same lists, which
 * are X-macros. For a code -errno, the C library supplies name and message. */
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

/* Returns NULL if the code is not one of SFR_E*. */
static const struct code_text *find_own_code(int code)
{
	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
		if (codes[i].code == code)
			return &codes[i];
	return NULL;
}

static bool is_errno(int code)
{
	return code <= 0 && code > -4096; /* Linux has errno values up to 4095 */
}

const char *sfr_code_name(int code)
{
	const struct code_text *own = find_own_code(code);
	const char *name = NULL;

	if (own != NULL)
		return own->name;
	if (is_errno(code))
		name = strerrorname_np(-code);
	return name != NULL ? name : "unknown";
}

const char *sfr_code_message(int code)
{
	const struct code_text *own = find_own_code(code);
	const char *text = NULL;

	if (own != NULL)
		return own->message;
	if (is_errno(code))
		text = strerrordesc_np(-code); /* not strerror, which may write into a buffer */
	return text != NULL ? text : "unknown error";
}

const char *sfr_phase_name(enum sfr_phase phase)
{
	return (unsigned)phase < SFR_NR_PHASES ? phases[phase] : "";
}

const char *sfr_state_name(enum sfr_state state)
{
	return (unsigned)state < SFR_NR_STATES ? states[state] : "";
}

void sfr__err_set_if_unset(struct sfr_err *err, int code, enum sfr_phase phase, const char *note)
{
	if (err->code != 0)
		return;
	err->code = code;
	err->phase = phase;
	err->index = -1;
	(void)snprintf(err->note, sizeof(err->note), "%s", note != NULL ? note : "");
}
