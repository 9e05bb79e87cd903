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
	struct sfr__mutex mu; /* guards the fields below; no driver call is made under it */
	/* NULL: no device is used; constant once set, like the next two */
	const struct sfr__cuda *cu;
	CUcontext context;
	uint32_t device;
	struct sfr__region *regions;
	char note[160]; /* a sentence about the worst fallback so far, or "" if there was none */
	int worst;      /* that fallback, an enum pin_way (pin.c); a higher number is worse */
};

void sfr__pin_init(struct sfr__pin *pin);
/* Releases all regions and the context; no block may be in use. Returns false if the driver may
 * still know some of the memory, because a block is retired or the driver refused to release a
 * region. That memory must stay mapped. Otherwise the driver would treat memory that is mapped
 * there later as registered. */
bool sfr__pin_fini(struct sfr__pin *pin);

/* Allows blocks to be pinned. They are pinned for all devices, through the context of `device`.
 * Only the first successful call has an effect. Returns 0, or -ENODEV or -EIO with the reason in
 * `why`. */
int sfr__pin_on(struct sfr__pin *pin, const struct sfr__cuda *cu, uint32_t device, char *why,
		size_t why_len);
bool sfr__pin_is_on(struct sfr__pin *pin);
/* Logs that nothing could be pinned, and why, and notes it for reports. */
void sfr__pin_failed(struct sfr__pin *pin, const char *why);

/* Pins `nr` adjacent blocks that the caller owns and that have all their memory, in few calls. A
 * block is registered, or gets memory that the driver allocates, or stays pageable. If it gets the
 * driver's memory, block->mem changes, the content is lost, and the block's own memory can be
 * freed. Any fallback is logged and noted for reports. The context must be current. */
void sfr__pin_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		     uint64_t block_bytes);
/* Does the same, but never replaces a block's memory, so addresses stay as they are. Blocks that
 * cannot be registered stay pageable, without a region. */
void sfr__pin_in_place(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		       uint64_t block_bytes);
/* Releases each region whose blocks are all in `list`; these blocks then have no region. The caller
 * owns the blocks in the list. Other regions stay, and so does a region that the driver refuses to
 * release. Enters the context itself. */
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
