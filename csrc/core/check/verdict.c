/* Stores the damage of a file, or of its records, in the result of the check. */
#include <errno.h>
#include <stdio.h> /* snprintf */
#include <string.h>

#include "check/records.h"
#include "base/base.h"

int sfr__check_end_with_damage(struct sfr_check *c, const char *wrong)
{
	if (c->result.error[0] == '\0')
		(void)snprintf(c->result.error, sizeof(c->result.error), "%s", wrong);
	c->state = SFR__CHECK_DONE;
	return 0;
}

int sfr__check_handle_read_error(struct sfr_check *c, int rc)
{
	if (rc == SFR_EAGAIN)
		return rc;
	if (rc == SFR_ECORRUPT) /* the file ended before its length at the start */
		return sfr__check_end_with_damage(c, "it was changed while it was read");
	c->os_error = true;
	return rc;
}

/* Returns a new string with the current record's name, in which '?' replaces control characters.
 * Returns NULL if there is no memory. */
static char *make_printable_name(const struct sfr_check *c)
{
	size_t len = c->rec.name_len;
	char *shown = sfr_sys.malloc(len + 1);

	if (shown == NULL)
		return NULL;
	for (size_t i = 0; i < len; i++) {
		unsigned char byte = (unsigned char)c->name[i];

		shown[i] = byte < 0x20 || byte == 0x7f ? '?' : (char)byte;
	}
	shown[len] = '\0';
	return shown;
}

int sfr__check_add_bad_record(struct sfr_check *c, const char *reason)
{
	struct sfr_check_result *r = &c->result;
	char *name;

	if (r->nr_listed == SFR_CHECK_MAX_LISTED) { /* the list is full: only count the record */
		r->nr_bad++;
		return 0;
	}
	if (c->bad == NULL) {
		c->bad = sfr_sys.calloc(SFR_CHECK_MAX_LISTED, sizeof(*c->bad));
		if (c->bad == NULL)
			return -ENOMEM;
		r->bad = c->bad;
	}
	name = make_printable_name(c);
	if (name == NULL)
		return -ENOMEM;
	if (r->nr_bad++ == 0)
		(void)snprintf(r->error, sizeof(r->error), "record %.300s: %s", name, reason);
	c->bad[r->nr_listed].name = name;
	c->bad[r->nr_listed++].reason = reason;
	return 0;
}
