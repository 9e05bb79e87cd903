/* Stores: host memory for samples of device memory.
 *
 * The memory should be pinned: queueing a copy to unpinned memory waits for all earlier work on the
 * stream. The driver allocates it, because pool memory cannot always be pinned. A lane keeps stores
 * from save to save, because allocating pinned memory is slow and can block streams. */
#include <errno.h>
#include <sys/mman.h>

#include "base/base.h"
#include "device/lane.h"

int sfr__cuda_host_buffer_new(const struct sfr__cuda_api *cu, size_t len,
			      struct sfr__cuda_host_buffer *store)
{
	*store = (struct sfr__cuda_host_buffer){ .len = (size_t)sfr__round_up(len, SFR_PAGE) };
	store->pinned =
		cu->host_alloc(&store->mem, store->len, CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS;
	if (store->pinned)
		return 0;
	store->mem = sfr_sys.mmap(NULL, store->len, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (store->mem != MAP_FAILED)
		return 0;
	store->mem = NULL;
	return -errno;
}

void sfr__cuda_host_buffer_free(const struct sfr__cuda_api *cu, struct sfr__cuda_host_buffer *store)
{
	if (store->mem && store->pinned)
		(void)cu->host_free(store->mem); /* at worst the memory is leaked */
	else if (store->mem)
		(void)sfr_sys.munmap(store->mem, store->len);
	*store = (struct sfr__cuda_host_buffer){ 0 };
}

void sfr__cuda_host_buffer_put(struct sfr__cuda_lane *lane, struct sfr__cuda_host_buffer *store)
{
	struct sfr__cuda_scope scope;
	bool dead;

	if (!store->mem)
		return;
	sfr__lock(&lane->mu);
	dead = lane->dead;
	for (size_t i = 0; i < SFR__CUDA_STORES_KEPT && !dead; i++) {
		if (!lane->stores[i].mem) { /* an empty place */
			lane->stores[i] = *store;
			*store = (struct sfr__cuda_host_buffer){ 0 };
			break;
		}
	}
	sfr__unlock(&lane->mu);
	/* On a dead device a copy may still be running, so the memory is never freed. */
	if (!store->mem || dead)
		return;
	/* If the context cannot be entered, host_free fails as well, and the memory is lost. */
	(void)sfr__cuda_enter(&scope, lane->cu, lane->context);
	sfr__cuda_host_buffer_free(lane->cu, store);
	sfr__cuda_leave(&scope);
}

int sfr__cuda_host_buffer_get(struct sfr__cuda_lane *lane, size_t len,
			      struct sfr__cuda_host_buffer *store)
{
	*store = (struct sfr__cuda_host_buffer){ 0 };
	sfr__lock(&lane->mu);
	for (size_t i = 0; i < SFR__CUDA_STORES_KEPT; i++) {
		if (lane->stores[i].mem && lane->stores[i].len >= len) {
			*store = lane->stores[i];
			lane->stores[i] = (struct sfr__cuda_host_buffer){ 0 };
			break;
		}
	}
	sfr__unlock(&lane->mu);
	return store->mem ? 0 : sfr__cuda_host_buffer_new(lane->cu, len, store);
}
