/* Notices: messages from the core's threads to the caller. base/notice.c implements them. */
#ifndef SFR_NOTICE_PUBLIC_H
#define SFR_NOTICE_PUBLIC_H

#include <stdint.h>

struct sfr_ticket;
struct sfr_snapshot;

/* a save's bytes are copied: the taker calls sfr_save_give_verdict and releases the sources */
#define SFR_NOTICE_COPIED 1u
#define SFR_NOTICE_ENDED 2u    /* a save has ended and given back its slot and blocks */
#define SFR_NOTICE_TEXT 3u     /* a sentence for the user's log */
#define SFR_NOTICE_STOP 4u     /* sfr_notice_post_stop was called */
#define SFR_NOTICE_SNAPSHOT 5u /* a snapshot's copies have ended */

struct sfr_notice {
	unsigned what;                 /* SFR_NOTICE_* */
	uint64_t number;               /* of the save or snapshot; never used twice */
	struct sfr_ticket *ticket;     /* for COPIED and ENDED: the taker owns a reference */
	struct sfr_snapshot *snapshot; /* for SNAPSHOT: the taker owns a reference */
	char text[1024];               /* for TEXT, else "" */
};
/* Waits for the next notice and takes it. Returns 0 or SFR_EAGAIN. */
int sfr_notice_wait(struct sfr_notice *out, uint64_t slice_ns);
/* Puts a notice back, so that the next sfr_notice_wait returns it. Only for the one thread that
 * takes notices. */
void sfr_notice_put_back(const struct sfr_notice *notice);
void sfr_notice_post_stop(void); /* makes one sfr_notice_wait return SFR_NOTICE_STOP */

#endif
