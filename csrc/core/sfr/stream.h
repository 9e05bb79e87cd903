/* Takes the bytes of a save in the order of the file, to send them elsewhere. See save/stream.c. */
#ifndef SFR_STREAM_PUBLIC_H
#define SFR_STREAM_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

struct sfr_ticket;

/* Bytes of the file, which stay valid and unchanged until the piece is given back. */
struct sfr_file_piece {
	const char *mem;
	size_t len;   /* 0: the end of the file */
	uint64_t off; /* in the file */
	void *owner;  /* for sfr_stream_give_back; NULL: there is nothing to give back */
};

/* Takes the next piece of a save with SFR_SAVE_STREAM. One thread at a time calls it, from
 * sfr_save_new on. After the last piece every call returns the end; it is given back only once.
 * Returns 0, or:
 *
 *   SFR_EAGAIN   there was no piece within the slice, or the save is not admitted
 *   SFR_ESTATE   the save has failed or was cancelled
 *   SFR_EFORK */
int sfr_stream_take_next_piece(struct sfr_ticket *t, uint64_t slice_ns,
			       struct sfr_file_piece *piece);
/* Gives a piece back, in any order and from any thread. The save ends only when all pieces are
 * given back. It becomes durable only if the end was given back, too. Does nothing in a forked
 * child. */
void sfr_stream_give_back(struct sfr_ticket *t, struct sfr_file_piece *piece);

#endif
