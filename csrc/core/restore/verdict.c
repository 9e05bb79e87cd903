/* Records results of a restore's readers: more bytes of a record, or the first failure. */
#include "restore/plan.h"
#include "base/base.h"

void sfr__restore_fail(struct sfr_restore *r, int code, uint64_t index, uint64_t off,
		       const char *reason)
{
	sfr__lock(&r->mu);
	if (r->failure.code == 0)
		r->failure = (struct sfr_restore_failure){ code, index, off, reason };
	r->stop = true;
	(void)pthread_cond_broadcast(&r->work);
	(void)pthread_cond_broadcast(&r->news);
	sfr__unlock(&r->mu);
}

void sfr__restore_got(struct sfr_restore *r, uint64_t index, uint64_t units, uint32_t crc)
{
	struct sfr__target *t = &r->targets[index];
	const struct sfr__place *p = &r->places[index];
	bool whole, wrong = false;

	sfr__lock(&r->mu);
	t->left -= units;
	t->crc ^= crc;
	whole = t->left == 0;
	/* With torch's compute_crc32=False all CRCs are zero, and the bytes cannot be checked. */
	if (whole && (r->flags & SFR_RESTORE_VERIFY) != 0)
		wrong = t->crc != p->crc && p->crc != 0;
	if (whole && !wrong) {
		atomic_store(&t->good, true);
		r->nr_good++;
		if (index == r->awaited || r->nr_good == r->nr)
			(void)pthread_cond_broadcast(&r->news);
	}
	sfr__unlock(&r->mu);
	if (wrong)
		sfr__restore_fail(r, SFR_ECORRUPT, index, t->data_off,
				  "its bytes do not match their CRC");
}
