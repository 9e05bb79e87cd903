/* What a lane's device gives and takes: events, pieces to be used again, and errors.
 *
 * After an error that nothing of the context survives the device is dead, and stays so: what it died
 * of is told once, and is the reason of everything that fails on it from then on.
 */
#include <errno.h>
#include <stdio.h>

#include "device/lane.h"

void sfr__cuda_die_locked(struct sfr__cuda_lane *lane, const char *call, CUresult rc)
{
	if (lane->dead)
		return;
	lane->dead = true;
	sfr__cuda_explain(lane->cu, lane->device, call, rc, lane->why, sizeof(lane->why));
	pthread_cond_signal(&lane->cv);
	sfr__notice_text("%s: nothing on this device can be saved any more", lane->why);
}

CUevent sfr__cuda_event_get_locked(struct sfr__cuda_lane *lane)
{
	CUevent event = NULL;
	CUresult rc;

	if (lane->nr_events > 0)
		return lane->events[--lane->nr_events];
	rc = lane->cu->event_new(&event, CU_EVENT_DISABLE_TIMING);
	if (sfr__cuda_is_sticky(rc))
		sfr__cuda_die_locked(lane, "cuEventCreate", rc);
	return rc == CUDA_SUCCESS ? event : NULL;
}

void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event)
{
	if (!event)
		return;
	if (lane->nr_events < SFR__CUDA_EVENTS_KEPT)
		lane->events[lane->nr_events++] = event;
	else
		(void)lane->cu->event_free(event); /* a dead context has freed it */
}

bool sfr__cuda_failed_locked(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			     struct sfr_err *err)
{
	char text[160];

	if (sfr__cuda_is_sticky(rc))
		sfr__cuda_die_locked(lane, call, rc);
	sfr__cuda_explain(lane->cu, lane->device, call, rc, text, sizeof(text));
	/* What it died of says more than what can no longer be done. */
	sfr__err_set(err, -EIO, SFR_PHASE_STAGE, lane->dead ? lane->why : text);
	return lane->dead;
}

struct sfr__cuda_piece *sfr__cuda_piece_get(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_piece *piece;

	sfr__lock(&lane->mu);
	piece = lane->free_pieces;
	if (piece)
		lane->free_pieces = piece->next;
	sfr__unlock(&lane->mu);
	return piece ? piece : sfr_sys.malloc(sizeof(*piece));
}

void sfr__cuda_piece_put(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece)
{
	sfr__lock(&lane->mu);
	piece->next = lane->free_pieces;
	lane->free_pieces = piece;
	sfr__unlock(&lane->mu);
}
