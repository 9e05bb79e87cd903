/* Notices: what the core has to tell. See base/notice.c. */
#ifndef SFR_NOTICE_PUBLIC_H
#define SFR_NOTICE_PUBLIC_H

#include <stdint.h>

struct sfr_ticket;
struct sfr_snapshot;

#define SFR_NOTICE_COPIED 1u   /* every byte copied: give sfr_save_confirm, let sources go */
#define SFR_NOTICE_ENDED 2u    /* slot, blocks and state are settled */
#define SFR_NOTICE_TEXT 3u     /* a sentence for the log: a remove dropped, a foreign temporary */
#define SFR_NOTICE_STOP 4u     /* sfr_notice_stop was called */
#define SFR_NOTICE_SNAPSHOT 5u /* a snapshot's lane has ended */

struct sfr_notice {
	unsigned what;                 /* SFR_NOTICE_* */
	uint64_t number;               /* of the save or snapshot: no other ever has it */
	struct sfr_ticket *ticket;     /* COPIED and ENDED: with a reference */
	struct sfr_snapshot *snapshot; /* SNAPSHOT: with a reference */
	char text[1024];               /* TEXT, else "" */
};
/* Takes the next notice. */
int sfr_notice_wait(struct sfr_notice *out, uint64_t slice_ns);
/* Who took it could not hand it on: it is the next one that is taken. For one thread that takes. */
void sfr_notice_again(const struct sfr_notice *notice);
void sfr_notice_stop(void); /* wakes every waiter with SFR_NOTICE_STOP, once each */

#endif
