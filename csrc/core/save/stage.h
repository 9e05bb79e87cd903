/* Staging: from the sources of a save to blocks in host memory. */
#ifndef SFR_SAVE_STAGE_H
#define SFR_SAVE_STAGE_H

#include "save/ticket.h"

/* ---- stage_host.c ---- */
/* Sets up staging.captured and staging.deferred, at admission. */
void sfr__host_copies_init(struct sfr_ticket *t);
/* Writes a segment that is not data: bytes of a header, or zeros for padding and descriptors. */
void sfr__stage_non_data(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst);
/* Prefetches the first bytes of an entry. Does nothing if `entry` is beyond the last entry. */
void sfr__prefetch_entry(const struct sfr_ticket *t, uint32_t entry);
/* Takes samples of the deferred sources in host memory, and with SFR_SAVE_CHECK_BYTES also their
 * checksums. Returns 0 or -ENOMEM. */
int sfr__take_samples(struct sfr_ticket *t);
/* Returns all sources of an extent, for sampling. The caller frees the array. Returns NULL if there
 * is no memory. */
struct sfr__source_to_sample *sfr__extent_list_sources(const struct sfr_ticket *t,
						       const struct sfr__extent *extent);
/* Compares `len` staged bytes, which are at offset `off` of the entry, with the samples. Returns
 * the index of the torn source, or -1. */
int64_t sfr__find_torn_source(const struct sfr_ticket *t, const struct sfr__samples *samples,
			      uint32_t entry, uint64_t off, const char *staged, size_t len);
/* Does the same with CRCs (SFR_SAVE_CHECK_BYTES). The caller passes an entry's bytes in ascending
 * order. Only the call with its last bytes can find the entry torn. */
int64_t sfr__find_torn_by_crc(struct sfr_ticket *t, uint32_t entry, uint64_t off,
			      const char *staged, size_t len);

/* ---- stage_device.c ---- */
/* Makes the device states of a new ticket from its image. Returns 0 or -ENOMEM. */
int sfr__device_states_new(struct sfr_ticket *t);
/* Queues copies of captured sources on devices and samples of deferred ones, and makes the caller's
 * streams wait for both. Returns 0, or SFR_EAGAIN or SFR_EEXHAUSTED like sfr_save_capture. Any
 * other error is recorded in the ticket, and the result is 0. */
int sfr__device_states_capture(struct sfr_ticket *t, uint64_t slice_ns);
/* Hands the device states to their lanes, or releases them if the save is failing. */
void sfr__device_states_queue_deferred(struct sfr_ticket *t);

#endif
