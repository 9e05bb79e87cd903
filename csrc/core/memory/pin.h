/* The part of a pool's memory that the CUDA driver knows. See pin.c. */
#ifndef SFR_PIN_H
#define SFR_PIN_H

#include "cuda/driver.h"

struct sfr__block;

/* Blocks that the driver was told of in one call. */
struct sfr__piece;

/* Embedded in a pool; all zero but for the mutex until sfr__pin_on. */
struct sfr__pin {
	struct sfr__mutex mu;       /* guards what follows; no driver call is made under it */
	const struct sfr__cuda *cu; /* NULL: not on. Constant once set, as the next three */
	CUcontext context;
	uint32_t device;
	int node; /* it hangs on, -1 = not known */
	struct sfr__piece *pieces;
	char note[160]; /* the worst that pinning had to resort to, "" = nothing */
	int worst;      /* how bad that was */
};

/* The NUMA node of the device through which blocks are pinned, -1 = none, or not known. */
int sfr__pin_node(struct sfr__pin *pin);
void sfr__pin_init(struct sfr__pin *pin);
/* Unregisters and frees everything, and lets go of the context. No block is in use. False when the
 * driver may still know some of it (a retired block's, or it refused): then that memory has to stay
 * mapped, or what is mapped there next would be taken for it. */
bool sfr__pin_fini(struct sfr__pin *pin);

/* From now on blocks can be pinned, through the context of `device`, for all devices. The first
 * device wins, later calls do nothing. 0, or -ENODEV / -EIO with `why`. */
int sfr__pin_on(struct sfr__pin *pin, const struct sfr__cuda *cu, uint32_t device, char *why,
		size_t why_len);
bool sfr__pin_is_on(struct sfr__pin *pin);
/* Notes that nothing could be pinned, and why. */
void sfr__pin_failed(struct sfr__pin *pin, const char *why);

/* Pins `nr` blocks in the caller's hand that follow one another and have memory for all of
 * `block_bytes`, in few calls. Registered, or else memory of the driver's (block->mem is that then,
 * with other bytes in it, and the block's own is to be given up), or else as they were: what was
 * resorted to is noted and told. Needs a context; never fails. */
void sfr__pin_blocks(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		     uint64_t block_bytes);
/* The same for blocks that have to stay where they are: no memory of the driver's for them. Those
 * that cannot be registered stay as they were, with no piece. */
void sfr__pin_in_place(struct sfr__pin *pin, struct sfr__block *const *blocks, uint32_t nr,
		       uint64_t block_bytes);
/* Takes from the driver what lies wholly in the list of blocks in hand: those have no piece any
 * more. The others still have theirs, and so has what the driver does not let go of. Enters the context itself. */
void sfr__pin_drop(struct sfr__pin *pin, struct sfr__block *list);
/* The block is retired: what the driver knows of it, it is to know for ever. */
void sfr__pin_keep(struct sfr__pin *pin, struct sfr__block *block);
/* Whether copies to the block need not pass through the driver's own staging. */
bool sfr__pin_is_pinned(const struct sfr__block *block);
/* Whether the kernel may refuse to write from the block directly: it is memory of a driver. */
bool sfr__pin_is_foreign(const struct sfr__block *block);
/* Copies the sentence for reports, "" when all went the best way. */
void sfr__pin_note(struct sfr__pin *pin, char *text, size_t len);

#endif
