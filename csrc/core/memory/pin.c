/* Pinning: registering the pool's memory with the CUDA driver.
 *
 * A copy engine only writes to memory whose pages cannot move. A block becomes such memory in the
 * best way that the system allows:
 *
 *     registered, with its neighbours in one call of at most 128 MiB    (warm_up)
 *     registered alone                                                  (a lane's first lease)
 *     memory of cuMemHostAlloc in its place
 *     left as it is: "pageable", copies to it pass through the driver's staging buffer
 *
 * Each step down this list is logged once and is in every report, because it costs time. Blocks are
 * pinned whole and never belong to two regions (`piece` here): the driver refuses a copy that
 * touches two registrations. A region is released as a whole, when a trim owns all its blocks.
 *
 * Regions are registered PORTABLE, for the contexts of all devices, so any device's context will
 * do.
 *
 * The owner of a block owns its `piece`. pin->mu guards the list of regions and is never held over
 * a driver call, which may take milliseconds for a large region.
 *
 * A region that the driver does not release stays mapped. Otherwise its range could be reused while
 * the driver still treats it as registered. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "memory/pin.h"
#include "memory/pool.h"

/* A registration holds locks of the driver for 60 to 250 ms a GiB, and nobody can launch kernels
 * meanwhile. */
#define PIECE_BYTES_MAX ((uint64_t)128 << 20)

enum way { REGISTERED, ALONE, ALLOCATED, PAGEABLE };

struct sfr__piece {
	struct sfr__piece *next;
	char *mem;  /* as registered with, or allocated by, the driver */
	char *home; /* the first block's address in the pool */
	enum way way;
	uint32_t nr_blocks;
	uint32_t nr_in_trim; /* guarded by pin->mu, like keep */
	bool keep;           /* a block of it is retired */
	bool gone;           /* in a trim: the driver has released it */
};

void sfr__pin_init(struct sfr__pin *pin)
{
	*pin = (struct sfr__pin){ .mu = SFR__MUTEX(SFR__LOCK_PIN) };
}

bool sfr__pin_is_on(struct sfr__pin *pin)
{
	return sfr__under(&pin->mu, pin->cu != NULL);
}

int sfr__pin_on(struct sfr__pin *pin, const struct sfr__cuda *cu, uint32_t device, char *why,
		size_t why_len)
{
	CUcontext context;
	int rc;

	if (sfr__pin_is_on(pin))
		return 0;
	rc = sfr__cuda_retain(cu, device, &context, why, why_len);
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
	if (context != NULL) /* another thread was first */
		sfr__cuda_release(cu, device);
	return 0;
}

/* ---- notes ---------------------------------------------------------------- */

static void note_text(struct sfr__pin *pin, enum way way, const char *text)
{
	bool told;

	sfr__lock(&pin->mu);
	told = pin->note[0] && (int)way <= pin->worst;
	if (!told) {
		(void)snprintf(pin->note, sizeof(pin->note), "%s", text);
		pin->worst = (int)way;
	}
	sfr__unlock(&pin->mu);
	if (!told)
		sfr__notice_text("%s", text);
}

void sfr__pin_failed(struct sfr__pin *pin, const char *why)
{
	char text[sizeof(pin->note)];

	(void)snprintf(text, sizeof(text),
		       "Staging memory stays pageable, and copies are slow: %.90s.", why);
	note_text(pin, PAGEABLE, text);
}

static void note(struct sfr__pin *pin, enum way way, CUresult rc, const char *call)
{
	static const char *const resorts[] = {
		[REGISTERED] = "it is registered in smaller pieces",
		[ALONE] = "it is registered block by block",
		[ALLOCATED] = "it is taken from cuMemHostAlloc",
		[PAGEABLE] = "it stays pageable, and copies are slow",
	};
	char text[sizeof(pin->note)], what[96];

	sfr__cuda_explain(pin->cu, pin->device, call, rc, what, sizeof(what));
	(void)snprintf(text, sizeof(text), "Staging memory: %s; %s.", what, resorts[way]);
	note_text(pin, way, text);
}

void sfr__pin_note(struct sfr__pin *pin, char *text, size_t len)
{
	sfr__lock(&pin->mu);
	(void)snprintf(text, len, "%s", pin->note);
	sfr__unlock(&pin->mu);
}

/* ---- pinning ---------------------------------------------------------------- */

static struct sfr__piece *add_piece(struct sfr__pin *pin, enum way way, char *mem, char *home,
				    uint32_t nr_blocks)
{
	struct sfr__piece *piece = sfr_sys.malloc(sizeof(*piece));

	if (!piece)
		return NULL;
	*piece =
		(struct sfr__piece){ .mem = mem, .home = home, .way = way, .nr_blocks = nr_blocks };
	sfr__lock(&pin->mu);
	piece->next = pin->pieces;
	pin->pieces = piece;
	sfr__unlock(&pin->mu);
	return piece;
}

/* Releases a region. False when the driver may still know it; its pages must then stay mapped. */
static bool give_back(const struct sfr__pin *pin, enum way way, char *mem)
{
	CUresult rc = CUDA_SUCCESS;

	if (way == REGISTERED || way == ALONE)
		rc = pin->cu->host_unregister(mem);
	else if (way == ALLOCATED)
		rc = pin->cu->host_free(mem);
	return rc == CUDA_SUCCESS || rc == CUDA_ERROR_DEINITIALIZED; /* the driver has shut down */
}

/* Registers adjacent blocks as one region. */
static CUresult register_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
				uint64_t block_bytes)
{
	enum way way = nr > 1 ? REGISTERED : ALONE;
	char *mem = blocks[0]->mem;
	struct sfr__piece *piece;
	CUresult rc = pin->cu->host_register(mem, (size_t)(nr * block_bytes),
					     CU_MEMHOSTREGISTER_PORTABLE);

	if (rc != CUDA_SUCCESS)
		return rc;
	piece = add_piece(pin, way, mem, mem, nr);
	if (!piece) {
		/* If this fails too, the next registration of this memory is refused as a
		 * duplicate. */
		(void)give_back(pin, way, mem);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	for (uint32_t i = 0; i < nr; i++)
		blocks[i]->piece = piece;
	return CUDA_SUCCESS;
}

static void pin_one(struct sfr__pin *pin, struct sfr__block *block, uint64_t block_bytes,
		    bool in_place)
{
	void *mem = NULL;
	CUresult rc;

	if (block->piece)
		return;
	rc = register_blocks(pin, &block, 1, block_bytes);
	if (rc == CUDA_SUCCESS)
		return;
	if (in_place) { /* no region, so that a later attempt can do better */
		note(pin, PAGEABLE, rc, "cuMemHostRegister");
		return;
	}
	note(pin, ALLOCATED, rc, "cuMemHostRegister");
	rc = pin->cu->host_alloc(&mem, (size_t)block_bytes, CU_MEMHOSTALLOC_PORTABLE);
	if (rc == CUDA_SUCCESS) {
		block->piece = add_piece(pin, ALLOCATED, mem, block->mem, 1);
		if (block->piece) {
			block->mem = mem;
			return;
		}
		/* on failure it is lost until the process ends */
		(void)give_back(pin, ALLOCATED, mem);
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	note(pin, PAGEABLE, rc, "cuMemHostAlloc");
	/* This region keeps later leases from trying again; a trim removes it. */
	block->piece = add_piece(pin, PAGEABLE, block->mem, block->mem, 1);
}

static void pin_many(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		     uint64_t block_bytes, bool in_place)
{
	uint64_t most = PIECE_BYTES_MAX / block_bytes;
	uint32_t at = 0, step;

	step = most > nr ? nr : most > 1 ? (uint32_t)most : 1;
	while (at < nr) {
		uint32_t len = step < nr - at ? step : nr - at;
		CUresult rc;

		if (len <= 1) {
			pin_one(pin, blocks[at++], block_bytes, in_place);
			continue;
		}
		rc = register_blocks(pin, blocks + at, len, block_bytes);
		if (rc == CUDA_SUCCESS) {
			at += len;
			continue;
		}
		step = len / 2;
		note(pin, step > 1 ? REGISTERED : ALONE, rc, "cuMemHostRegister");
	}
}

void sfr__pin_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		     uint64_t block_bytes)
{
	pin_many(pin, blocks, nr, block_bytes, false);
}

void sfr__pin_in_place(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		       uint64_t block_bytes)
{
	pin_many(pin, blocks, nr, block_bytes, true);
}

void sfr__pin_keep(struct sfr__pin *pin, struct sfr__block *block)
{
	sfr__lock(&pin->mu);
	if (block->piece)
		block->piece->keep = true;
	sfr__unlock(&pin->mu);
}

bool sfr__pin_is_pinned(const struct sfr__block *block)
{
	return block->piece && block->piece->way != PAGEABLE;
}

bool sfr__pin_is_foreign(const struct sfr__block *block)
{
	return block->piece && block->piece->way == ALLOCATED;
}

/* ---- releasing ------------------------------------------------------------------- */

static void unlink_locked(struct sfr__pin *pin, struct sfr__piece *piece)
{
	struct sfr__piece **at = &pin->pieces;

	while (*at != piece)
		at = &(*at)->next;
	*at = piece->next;
}

/* Takes regions that lie entirely in the blocks of a trim off the list. */
static struct sfr__piece *take_whole_locked(struct sfr__pin *pin, struct sfr__block *list)
{
	struct sfr__piece *taken = NULL;

	for (struct sfr__block *b = list; b; b = b->next)
		if (b->piece)
			b->piece->nr_in_trim++;
	for (struct sfr__block *b = list; b; b = b->next) {
		struct sfr__piece *piece = b->piece;

		if (!piece || piece->nr_in_trim != piece->nr_blocks)
			continue;
		unlink_locked(pin, piece);
		piece->next = taken;
		taken = piece;
		piece->nr_in_trim = 0; /* so that it is taken once */
	}
	for (struct sfr__block *b = list; b; b = b->next)
		if (b->piece)
			b->piece->nr_in_trim = 0;
	return taken;
}

void sfr__pin_drop(struct sfr__pin *pin, struct sfr__block *list)
{
	struct sfr__cuda_scope scope;
	struct sfr__piece *taken, *piece;

	if (!sfr__pin_is_on(pin))
		return;
	sfr__lock(&pin->mu);
	taken = take_whole_locked(pin, list);
	sfr__unlock(&pin->mu);
	if (!taken)
		return;
	/* A failure shows in the calls that follow. */
	(void)sfr__cuda_enter(&scope, pin->cu, pin->context);
	for (piece = taken; piece; piece = piece->next)
		piece->gone = give_back(pin, piece->way, piece->mem);
	sfr__cuda_leave(&scope);
	for (struct sfr__block *b = list; b; b = b->next) {
		if (!b->piece || !b->piece->gone)
			continue;
		if (b->piece->way == ALLOCATED)
			b->mem = b->piece->home;
		b->piece = NULL;
	}
	sfr__lock(&pin->mu);
	while ((piece = taken)) {
		taken = piece->next;
		if (piece->gone) {
			sfr_sys.free(piece);
			continue;
		}
		piece->next = pin->pieces;
		pin->pieces = piece;
	}
	sfr__unlock(&pin->mu);
}

bool sfr__pin_fini(struct sfr__pin *pin)
{
	struct sfr__cuda_scope scope;
	struct sfr__piece *piece;
	bool all = true;

	if (pin->cu) {
		(void)sfr__cuda_enter(&scope, pin->cu, pin->context); /* as in sfr__pin_drop */
		while ((piece = pin->pieces)) {
			pin->pieces = piece->next;
			if (piece->keep || !give_back(pin, piece->way, piece->mem))
				all = false;
			sfr_sys.free(piece);
		}
		sfr__cuda_leave(&scope);
		sfr__cuda_release(pin->cu, pin->device);
	}
	sfr__mutex_fini(&pin->mu); /* the caller guarantees that nobody uses it */
	return all;
}
