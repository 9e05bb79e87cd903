/* A growing list of copies to queue together, in the arrays that the driver takes. */
#include <errno.h>

#include "base/base.h"
#include "device/lane.h"

int sfr__cuda_batch_add(struct sfr__cuda_batch *batch, uint64_t dst, uint64_t src, size_t len)
{
	if (batch->nr == batch->room) {
		size_t room = batch->room ? batch->room * 2 : 64;
		CUdeviceptr *to = sfr_sys.realloc(batch->dst, room * sizeof(*to));
		CUdeviceptr *from;
		size_t *lens;

		if (!to)
			return -ENOMEM;
		batch->dst = to;
		from = sfr_sys.realloc(batch->src, room * sizeof(*from));
		if (!from)
			return -ENOMEM;
		batch->src = from;
		lens = sfr_sys.realloc(batch->len, room * sizeof(*lens));
		if (!lens)
			return -ENOMEM;
		batch->len = lens;
		batch->room = room;
	}
	batch->dst[batch->nr] = dst;
	batch->src[batch->nr] = src;
	batch->len[batch->nr++] = len;
	return 0;
}

void sfr__cuda_batch_free(struct sfr__cuda_batch *batch)
{
	sfr_sys.free(batch->dst);
	sfr_sys.free(batch->src);
	sfr_sys.free(batch->len);
}

void sfr__cuda_batch_copy(struct sfr__cuda_lane *lane, struct sfr__cuda_batch *batch, bool pinned,
			  struct sfr_err *err)
{
	if (batch->nr && !err->code)
		sfr__cuda_copy(lane, batch->dst, batch->src, batch->len, batch->nr, pinned, err);
}
