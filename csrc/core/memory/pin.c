/* Pinning: registering the pool's memory with the CUDA driver.
 *
 * A copy engine only writes to memory whose pages cannot move. A block becomes such memory in the
 * best way that the system allows:
 *
 *     registered, with its neighbours in one call of at most 128 MiB    (warm_up)
 *     registered alone                                                  (a lane's first lease)
 *     replaced by memory of cuMemHostAlloc
 *     left as it is: "pageable", copies to it pass through a buffer of the driver
 *
 * When a worse way is used for the first time, this is logged. A block is pinned as a whole and
 * belongs to one region, because the driver refuses a copy that touches two registrations. A region
 * is released as a whole, when a trim owns all its blocks. Regions are registered with PORTABLE,
 * which means for the contexts of all devices.
 *
 * Only the owner of a block changes its `region`. pin->mu guards the list of regions, but is not
 * held during driver calls, because registering a large region takes milliseconds.
 *
 * A region that the driver does not release stays mapped. The driver would treat any other memory
 * at its addresses as registered. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "memory/pin.h"
#include "memory/pool.h"

/* A registration holds locks of the driver for 60 to 250 ms a GiB, and no thread can launch kernels
 * meanwhile. */
#define REGION_BYTES_MAX ((uint64_t)128 << 20)

/* How a region is pinned, the best way first. */
enum pin_way {
	REGISTERED, /* in one region with adjacent blocks */
	ALONE,      /* registered as a region of one block */
	ALLOCATED,  /* replaced by memory of cuMemHostAlloc */
	PAGEABLE,   /* not pinned */
};

struct sfr__region {
	struct sfr__region *next;
	char *mem;       /* the address that the driver knows */
	char *pool_addr; /* the first block's address in the pool; not `mem` if ALLOCATED */
	enum pin_way way;
	uint32_t nr_blocks;
	/* how many of its blocks are in the list of sfr__pin_release_regions; guarded by pin->mu */
	uint32_t nr_in_list;
	bool never_release; /* one of its blocks is retired; guarded by pin->mu */
	bool released;      /* by the driver, in sfr__pin_release_regions */
};

void sfr__pin_init(struct sfr__pin *pin)
{
	*pin = (struct sfr__pin){ .mu = SFR__MUTEX(SFR__LOCK_PIN) };
}

bool sfr__pin_is_on(struct sfr__pin *pin)
{
	return sfr__under(&pin->mu, pin->cu != NULL);
}

int sfr__pin_turn_on(struct sfr__pin *pin, const struct sfr__cuda_api *cu, uint32_t device,
		     char *why, size_t why_len)
{
	CUcontext context;
	int rc;

	if (sfr__pin_is_on(pin))
		return 0;
	rc = sfr__cuda_retain_primary_context(cu, device, &context, why, why_len);
	if (rc != 0)
		return rc;
	sfr__lock(&pin->mu);
	if (pin->cu == NULL) {
		pin->context = context;
		pin->device = device;
		pin->cu = cu;
		context = NULL;
	}
	sfr__unlock(&pin->mu);
	if (context != NULL) /* not stored: another thread was first */
		sfr__cuda_release_primary_context(cu, device);
	return 0;
}

/* ---- notes ---------------------------------------------------------------- */

/* Logs `text` and keeps it for reports, unless a fallback at least as bad was noted before. */
static void log_fallback(struct sfr__pin *pin, enum pin_way way, const char *text)
{
	bool noted;

	sfr__lock(&pin->mu);
	noted = pin->note[0] && (int)way <= pin->worst_fallback;
	if (!noted) {
		(void)snprintf(pin->note, sizeof(pin->note), "%s", text);
		pin->worst_fallback = (int)way;
	}
	sfr__unlock(&pin->mu);
	if (!noted)
		sfr__notice_post_text("%s", text);
}

void sfr__pin_report_failure(struct sfr__pin *pin, const char *why)
{
	char text[sizeof(pin->note)];

	(void)snprintf(text, sizeof(text),
		       "Staging memory stays pageable, and copies are slow: %.90s.", why);
	log_fallback(pin, PAGEABLE, text);
}

/* Notes that `call` failed with `rc`, so that the blocks are now pinned in the worse `way`. */
static void note_fallback_to(struct sfr__pin *pin, enum pin_way way, CUresult rc, const char *call)
{
	static const char *const fallbacks[] = {
		[REGISTERED] = "it is registered in smaller regions",
		[ALONE] = "it is registered block by block",
		[ALLOCATED] = "it is taken from cuMemHostAlloc",
		[PAGEABLE] = "it stays pageable, and copies are slow",
	};
	char text[sizeof(pin->note)], what[96];

	sfr__cuda_format_error(pin->cu, pin->device, call, rc, what, sizeof(what));
	(void)snprintf(text, sizeof(text), "Staging memory: %s; %s.", what, fallbacks[way]);
	log_fallback(pin, way, text);
}

void sfr__pin_get_fallback_note(struct sfr__pin *pin, char *text, size_t len)
{
	sfr__lock(&pin->mu);
	(void)snprintf(text, len, "%s", pin->note);
	sfr__unlock(&pin->mu);
}

/* ---- pinning ---------------------------------------------------------------- */

/* Returns the new region, or NULL if there is no memory. */
static struct sfr__region *add_region(struct sfr__pin *pin, enum pin_way way, char *mem,
				      char *pool_addr, uint32_t nr_blocks)
{
	struct sfr__region *region = sfr_sys.malloc(sizeof(*region));

	if (!region)
		return NULL;
	*region = (struct sfr__region){
		.mem = mem, .pool_addr = pool_addr, .way = way, .nr_blocks = nr_blocks
	};
	sfr__lock(&pin->mu);
	region->next = pin->regions;
	pin->regions = region;
	sfr__unlock(&pin->mu);
	return region;
}

/* Returns false if the driver may still have the registration; the memory must then stay mapped. */
static bool release_memory(const struct sfr__pin *pin, enum pin_way way, char *mem)
{
	CUresult rc = CUDA_SUCCESS;

	if (way == REGISTERED || way == ALONE)
		rc = pin->cu->host_unregister(mem);
	else if (way == ALLOCATED)
		rc = pin->cu->host_free(mem);
	/* DEINITIALIZED: the driver has shut down, and with it all registrations ended */
	return rc == CUDA_SUCCESS || rc == CUDA_ERROR_DEINITIALIZED;
}

/* Registers adjacent blocks as one region. Returns the driver's error, or OUT_OF_MEMORY. */
static CUresult register_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
				uint64_t block_bytes)
{
	enum pin_way way = nr > 1 ? REGISTERED : ALONE;
	char *mem = blocks[0]->mem;
	struct sfr__region *region;
	CUresult rc = pin->cu->host_register(mem, (size_t)(nr * block_bytes),
					     CU_MEMHOSTREGISTER_PORTABLE);

	if (rc != CUDA_SUCCESS)
		return rc;
	region = add_region(pin, way, mem, mem, nr);
	if (!region) {
		/* If this fails too, the driver refuses the next registration as a duplicate. */
		(void)release_memory(pin, way, mem);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	for (uint32_t i = 0; i < nr; i++)
		blocks[i]->region = region;
	return CUDA_SUCCESS;
}

/* Pins a block in the best way that works. With `in_place`, its memory must not be replaced. */
static void pin_one(struct sfr__pin *pin, struct sfr__block *block, uint64_t block_bytes,
		    bool in_place)
{
	void *mem = NULL;
	CUresult rc;

	if (block->region)
		return;
	rc = register_blocks(pin, &block, 1, block_bytes);
	if (rc == CUDA_SUCCESS)
		return;
	if (in_place) { /* no region, so a later attempt can do better */
		note_fallback_to(pin, PAGEABLE, rc, "cuMemHostRegister");
		return;
	}
	note_fallback_to(pin, ALLOCATED, rc, "cuMemHostRegister");
	rc = pin->cu->host_alloc(&mem, (size_t)block_bytes, CU_MEMHOSTALLOC_PORTABLE);
	if (rc == CUDA_SUCCESS) {
		block->region = add_region(pin, ALLOCATED, mem, block->mem, 1);
		if (block->region) {
			block->mem = mem;
			return;
		}
		/* if the driver refuses, the memory is lost until the process ends */
		(void)release_memory(pin, ALLOCATED, mem);
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	note_fallback_to(pin, PAGEABLE, rc, "cuMemHostAlloc");
	/* The block gets a region all the same, so that later leases do not try again. A trim
	 * removes this region. */
	block->region = add_region(pin, PAGEABLE, block->mem, block->mem, 1);
}

/* Pins adjacent blocks in regions that are as large as possible. Each refusal halves their size. */
static void pin_adjacent_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
				uint64_t block_bytes, bool in_place)
{
	uint64_t nr_per_region_max = REGION_BYTES_MAX / block_bytes;
	uint32_t next = 0, nr_per_region = nr;

	if (nr_per_region_max < nr)
		nr_per_region = nr_per_region_max > 1 ? (uint32_t)nr_per_region_max : 1;
	while (next < nr) {
		uint32_t len = nr_per_region < nr - next ? nr_per_region : nr - next;
		CUresult rc;

		if (len <= 1) {
			pin_one(pin, blocks[next++], block_bytes, in_place);
			continue;
		}
		rc = register_blocks(pin, blocks + next, len, block_bytes);
		if (rc == CUDA_SUCCESS) {
			next += len;
			continue;
		}
		nr_per_region = len / 2;
		note_fallback_to(pin, nr_per_region > 1 ? REGISTERED : ALONE, rc,
				 "cuMemHostRegister");
	}
}

void sfr__pin_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		     uint64_t block_bytes)
{
	pin_adjacent_blocks(pin, blocks, nr, block_bytes, false);
}

void sfr__pin_in_place(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		       uint64_t block_bytes)
{
	pin_adjacent_blocks(pin, blocks, nr, block_bytes, true);
}

void sfr__pin_never_release(struct sfr__pin *pin, struct sfr__block *block)
{
	sfr__lock(&pin->mu);
	if (block->region)
		block->region->never_release = true;
	sfr__unlock(&pin->mu);
}

bool sfr__pin_is_pinned(const struct sfr__block *block)
{
	return block->region && block->region->way != PAGEABLE;
}

bool sfr__pin_is_driver_memory(const struct sfr__block *block)
{
	return block->region && block->region->way == ALLOCATED;
}

/* ---- releasing ------------------------------------------------------------------- */

static void unlink_region_locked(struct sfr__pin *pin, struct sfr__region *region)
{
	struct sfr__region **at = &pin->regions;

	while (*at != region)
		at = &(*at)->next;
	*at = region->next;
}

/* Removes the regions whose blocks are all in `list` from pin->regions. Returns them as a list. */
static struct sfr__region *take_regions_fully_in_list_locked(struct sfr__pin *pin,
							     struct sfr__block *list)
{
	struct sfr__region *taken = NULL;

	for (struct sfr__block *b = list; b; b = b->next)
		if (b->region)
			b->region->nr_in_list++;
	for (struct sfr__block *b = list; b; b = b->next) {
		struct sfr__region *region = b->region;

		if (!region || region->nr_in_list != region->nr_blocks)
			continue;
		unlink_region_locked(pin, region);
		region->next = taken;
		taken = region;
		region->nr_in_list = 0; /* so that its next block in the list is skipped */
	}
	for (struct sfr__block *b = list; b; b = b->next)
		if (b->region)
			b->region->nr_in_list = 0;
	return taken;
}

void sfr__pin_release_regions(struct sfr__pin *pin, struct sfr__block *list)
{
	struct sfr__cuda_scope scope;
	struct sfr__region *taken, *region;

	if (!sfr__pin_is_on(pin))
		return;
	sfr__lock(&pin->mu);
	taken = take_regions_fully_in_list_locked(pin, list);
	sfr__unlock(&pin->mu);
	if (!taken)
		return;
	/* if this fails, so do the calls that follow */
	(void)sfr__cuda_enter(&scope, pin->cu, pin->context);
	for (region = taken; region; region = region->next)
		region->released = release_memory(pin, region->way, region->mem);
	sfr__cuda_leave(&scope);
	for (struct sfr__block *b = list; b; b = b->next) {
		if (!b->region || !b->region->released)
			continue;
		if (b->region->way == ALLOCATED) /* b->mem was the driver's memory */
			b->mem = b->region->pool_addr;
		b->region = NULL;
	}
	sfr__lock(&pin->mu);
	while ((region = taken)) {
		taken = region->next;
		if (region->released) {
			sfr_sys.free(region);
			continue;
		}
		region->next = pin->regions; /* not released: it goes back into the list */
		pin->regions = region;
	}
	sfr__unlock(&pin->mu);
}

bool sfr__pin_fini(struct sfr__pin *pin)
{
	struct sfr__cuda_scope scope;
	struct sfr__region *region;
	bool all_released = true;

	if (pin->cu) {
		/* if this fails, so do the calls that follow */
		(void)sfr__cuda_enter(&scope, pin->cu, pin->context);
		while ((region = pin->regions)) {
			pin->regions = region->next;
			if (region->never_release || !release_memory(pin, region->way, region->mem))
				all_released = false;
			sfr_sys.free(region);
		}
		sfr__cuda_leave(&scope);
		sfr__cuda_release_primary_context(pin->cu, pin->device);
	}
	sfr__mutex_fini(&pin->mu); /* the caller guarantees that nobody uses it */
	return all_released;
}
