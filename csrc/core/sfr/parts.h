/* A file described part by part. archive/parts.c and archive/tensor.c implement it. */
#ifndef SFR_PARTS_PUBLIC_H
#define SFR_PARTS_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

struct sfr_engine;
struct sfr_save_desc;
struct sfr_ticket;

/* The contents of a file in order: bytes, sources, and fields that hold the CRC-32 of an earlier
 * source. One thread uses the list until a save owns it. Functions return 0 or -errno. After an
 * error every later call, and the save, return the same error. */
struct sfr_parts;
int sfr_parts_new(struct sfr_parts **out);
void sfr_parts_free(struct sfr_parts *parts); /* accepts NULL */
/* Returns the length so far, which is the offset of the next part. */
uint64_t sfr_parts_file_len(const struct sfr_parts *parts);
/* Appends bytes, copied in the call. */
int sfr_parts_add_bytes(struct sfr_parts *parts, const void *bytes, size_t len);
/* Appends host memory, which writers read when they write the file. The memory must stay valid and
 * unchanged until the save has ended. A long source whose address equals its file offset modulo
 * 4096 is written in place; any other goes through a writer's buffer. */
int sfr_parts_add_source(struct sfr_parts *parts, uint64_t addr, uint64_t nbytes);
/* Appends four bytes for the CRC of source number `source`, counted from 0. -EINVAL: there is no
 * such source yet. */
int sfr_parts_add_crc(struct sfr_parts *parts, uint32_t source);
/* A contiguous tensor in host memory. */
struct sfr_tensor {
	const char *storage; /* torch's name of the storage type, such as "FloatStorage" */
	uint64_t addr, nbytes;
	uint64_t numel; /* elements of the storage */
	uint32_t ndim;
	const int64_t *sizes, *strides; /* in elements */
};
/* Appends a tensor as an archive of its own, as torch.save(tensor) makes it. Padding aligns the
 * tensor's bytes, so that they can be written in place. */
int sfr_parts_add_tensor(struct sfr_parts *parts, const struct sfr_tensor *tensor);

/* Makes a save of the parts to the target in `desc`, which has no skeleton and no sources. The
 * caller goes on as with any other save: admit, capture, launch. The file is exactly as long as the
 * parts. SFR_WAIT_COPIED is reached when the last source was written, or handed to the stream. On
 * success the save owns the parts. Returns 0, -ENOMEM, -EINVAL, -EFBIG or SFR_EFORK. */
int sfr_save_new_parts(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		       struct sfr_parts *parts, struct sfr_ticket **out);

#endif
