/* Pins the blocks of a pool, so that a device can copy to them directly. */
#ifndef SFR_PIN_H
#define SFR_PIN_H

#include "cuda/driver.h"

struct sfr__block;

/* Blocks that one call registered with the driver. */
struct sfr__region;

/* The pinned memory of a pool. All zero except the mutex until sfr__pin_turn_on. */
struct sfr__pin {
	struct sfr__mutex mu; /* guards the fields below; no driver call is made under it */
	/* set together by sfr__pin_turn_on, then constant */
	const struct sfr__cuda_api *cu; /* NULL: no device is used */
	CUcontext context;
	uint32_t device;
	struct sfr__region *regions;
	char note[160];     /* a sentence about the worst fallback so far, or "" */
	int worst_fallback; /* an enum pin_way; a higher number is worse */
};

void sfr__pin_init(struct sfr__pin *pin);
/* Releases all regions and the context; no block may be in use. Returns false if the driver may
 * still have a registration of some memory. That memory must stay mapped: the driver would treat
 * any other memory at its addresses as registered. */
bool sfr__pin_fini(struct sfr__pin *pin);

/* Allows blocks to be pinned, for all devices, through the context of `device`. Only the first
 * successful call has an effect. Returns 0, or -ENODEV or -EIO with the reason in `why`. */
int sfr__pin_turn_on(struct sfr__pin *pin, const struct sfr__cuda_api *cu, uint32_t device,
		     char *why, size_t why_len);
bool sfr__pin_is_on(struct sfr__pin *pin);
/* Logs that nothing could be pinned, and why, and notes this for reports. */
void sfr__pin_report_failure(struct sfr__pin *pin, const char *why);

/* Pins `nr` adjacent blocks in few calls. The caller owns the blocks, which have all their memory,
 * and the context is current. Each block's memory becomes one of these:
 * - registered;
 * - replaced by memory of the driver: block->mem changes, the content is lost, and the block's own
 *   memory can be freed;
 * - pageable, so copies to it are slow.
 * Fallbacks are logged and noted for reports. */
void sfr__pin_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		     uint64_t block_bytes);
/* Does the same as sfr__pin_blocks, but replaces no memory. A block that cannot be registered stays
 * pageable and gets no region. */
void sfr__pin_in_place(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		       uint64_t block_bytes);
/* Releases each region whose blocks are all in `list`, unless the driver refuses. These blocks then
 * have no region. The caller owns the blocks in the list. Enters the context itself. */
void sfr__pin_release_regions(struct sfr__pin *pin, struct sfr__block *list);
/* Ensures that the region of a retired block is never released. */
void sfr__pin_never_release(struct sfr__pin *pin, struct sfr__block *block);
/* Returns whether a device can copy to the block directly. */
bool sfr__pin_is_pinned(const struct sfr__block *block);
/* Returns whether the block uses memory that the driver allocated. The kernel may refuse to write
 * from it with O_DIRECT. */
bool sfr__pin_is_driver_memory(const struct sfr__block *block);
/* Copies the sentence about fallbacks for reports, or "". */
void sfr__pin_get_fallback_note(struct sfr__pin *pin, char *text, size_t len);

#endif
