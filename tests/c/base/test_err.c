/* err.c: every code, phase and state has a name and a message, and the first error is kept. */
#include <errno.h>
#include <string.h>

#include "sfr.h"
#include "base/base.h"
#include "check.h"

TEST(every_code_of_the_core_has_a_name_and_message)
{
#define X(name, value, text)                                                                       \
	CHECK_EQ(name, value);                                                                     \
	CHECK(strcmp(sfr_code_name(name), #name) == 0);                                            \
	CHECK(strcmp(sfr_code_message(name), text) == 0);
	SFR_ERROR_LIST(X)
#undef X
}

TEST(errno_has_the_systems_message)
{
	for (int err = 1; err < 133; err++) {
		if (strstr(strerror(err), "Unknown") != NULL)
			continue;
		CHECK(strcmp(sfr_code_message(-err), strerror(err)) == 0);
		CHECK(sfr_code_name(-err)[0] == 'E' || strcmp(sfr_code_name(-err), "unknown") == 0);
	}
	CHECK(strcmp(sfr_code_name(-ENOSPC), "ENOSPC") == 0);
	CHECK(strcmp(sfr_code_name(0), "0") == 0);
}

TEST(unknown_code_has_a_message_too)
{
	static const int codes[] = { INT32_MIN, -5000, -1000, -1999, 1, EIO, INT32_MAX };

	for (int i = 0; i < 7; i++) {
		CHECK(strcmp(sfr_code_name(codes[i]), "unknown") == 0);
		CHECK(sfr_code_message(codes[i])[0] != '\0');
	}
	CHECK(strcmp(sfr_phase_name((enum sfr_phase)99), "") == 0);
	CHECK(strcmp(sfr_state_name((enum sfr_state)99), "") == 0);
}

TEST(every_phase_and_state_has_a_name)
{
#define X(name, text) CHECK(strcmp(sfr_phase_name(name), text) == 0);
	SFR_PHASE_LIST(X)
#undef X
#define X(name, text) CHECK(strcmp(sfr_state_name(name), text) == 0);
	SFR_STATE_LIST(X)
#undef X
}

TEST(first_error_is_kept)
{
	struct sfr_err err = { 0 };
	char longer[400];

	memset(longer, 'x', sizeof(longer));
	longer[sizeof(longer) - 1] = '\0';
	sfr__err_set_if_unset(&err, -EIO, SFR_PHASE_WRITE, longer);
	CHECK_EQ(strlen(err.note), sizeof(err.note) - 1);
	sfr__err_set_if_unset(&err, -ENOSPC, SFR_PHASE_SYNC, "later");
	CHECK_EQ(err.code, -EIO);
	CHECK_EQ(err.phase, SFR_PHASE_WRITE);
	CHECK_EQ(err.index, -1);
	CHECK_EQ(err.note[0], 'x');
	err = (struct sfr_err){ 0 };
	sfr__err_set_if_unset(&err, SFR_ETORN, SFR_PHASE_STAGE, NULL);
	CHECK_EQ(err.code, SFR_ETORN);
	CHECK(strcmp(err.note, "") == 0);
}
