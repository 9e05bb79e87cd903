/* Pins the blocks of a pool: makes them memory to which a device can copy directly. pin.c
 * implements it. */
#ifndef SFR_PIN_H
#define SFR_PIN_H

#include "cuda/driver.h"

struct sfr__block;

/* A region: blocks that one call registered with the driver. */
struct sfr__region;

/* Embedded in a pool; all zero except the mutex until sfr__pin_on. */
struct sfr__pin {
	struct sfr__mutex mu; /* guards what follows; no driver call is made under it */
	const struct sfr__cuda
		*cu; /* NULL: no device is used. Constant once set, like the next two */
	CUcontext context;
	uint32_t device;
	struct sfr__region *regions;
	char note[160]; /* a sentence about the worst fallback so far, or "" */
	int worst;      /* that fallback, an enum of pin.c: the higher, the worse */
};

void sfr__pin_init(struct sfr__pin *pin);
/* Releases all regions and the context; no block may be in use. Returns false if the driver may
 * still know some of the memory (a retired block, or a refusal). That memory must stay mapped, or
 * the driver would treat whatever is mapped there next as registered. */
bool sfr__pin_fini(struct sfr__pin *pin);

/* Lets blocks be pinned, for all devices, through the context of `device`. Only the first
 * successful call has an effect. Returns 0, or -ENODEV or -EIO with the reason in `why`. */
int sfr__pin_on(struct sfr__pin *pin, const struct sfr__cuda *cu, uint32_t device, char *why,
		size_t why_len);
bool sfr__pin_is_on(struct sfr__pin *pin);
/* Logs, and notes for reports, that nothing could be pinned, and why. */
void sfr__pin_failed(struct sfr__pin *pin, const char *why);

/* Pins `nr` adjacent blocks that the caller owns and that have all their memory, in few calls. A
 * block is registered; or it gets memory that the driver allocates (block->mem changes, the content
 * is lost, and the block's own memory can be freed); or it stays pageable. Any fallback is logged
 * and noted for reports. The context must be current. */
void sfr__pin_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		     uint64_t block_bytes);
/* Does the same for blocks whose address must not change, and which therefore cannot get other
 * memory. Blocks that cannot be registered stay pageable, without a region. */
void sfr__pin_in_place(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		       uint64_t block_bytes);
/* Releases the regions that lie entirely in a list of blocks that the caller owns; these blocks
 * then have none. Regions of other blocks, and those that the driver does not release, stay. Enters
 * the context itself. */
void sfr__pin_drop(struct sfr__pin *pin, struct sfr__block *list);
/* Marks the region of a retired block, so that it is never released. */
void sfr__pin_keep(struct sfr__pin *pin, struct sfr__block *block);
/* Returns whether a device can copy to the block directly, not through the driver's own buffer. */
bool sfr__pin_is_pinned(const struct sfr__block *block);
/* Returns whether the block uses memory that the driver allocated. The kernel may refuse to write
 * from it with O_DIRECT. */
bool sfr__pin_is_foreign(const struct sfr__block *block);
/* Copies the sentence for reports; it is "" if there was no fallback. */
void sfr__pin_note(struct sfr__pin *pin, char *text, size_t len);

#endif
