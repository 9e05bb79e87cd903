/* A file made of parts. See archive/parts.c, archive/tensor.c. */
#ifndef SFR_PARTS_PUBLIC_H
#define SFR_PARTS_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

struct sfr_engine;
struct sfr_save_desc;
struct sfr_ticket;

/* What a file consists of, in the order of the file: bytes, sources, and fields that hold the CRC-32 of
 * a source before them. One thread's, until a save has it. Functions return 0 or -errno; the first
 * failure is kept, and every later call, and the save, return it. */
struct sfr_parts;
int sfr_parts_new(struct sfr_parts **out);
void sfr_parts_free(struct sfr_parts *parts); /* NULL is fine */
/* The length so far: where the next part will stand. */
uint64_t sfr_parts_len(const struct sfr_parts *parts);
/* Bytes, which are copied in the call. */
int sfr_parts_bytes(struct sfr_parts *parts, const void *bytes, size_t len);
/* Memory of the host, which is read when it is written and not before: it stays valid and as it is
 * until the save has *ended*. What is long enough, and stands in memory where it stands in the
 * file (modulo 4096), is written from there; the rest goes through a writer's buffer. */
int sfr_parts_source(struct sfr_parts *parts, uint64_t addr, uint64_t nbytes);
/* Four bytes: the CRC of the source that was number `source`, from 0. -EINVAL: there is none yet. */
int sfr_parts_crc(struct sfr_parts *parts, uint32_t source);
/* A contiguous tensor in host memory (the file keeps its strides, whatever they are) as an archive of
 * its own, byte for byte what torch.load expects of torch.save(tensor): a source with what stands
 * before and behind it. Its data stand so in the file that they can be written from where they are. */
struct sfr_tensor {
	const char *storage; /* torch's name of the type of storage, such as "FloatStorage" */
	uint64_t addr, nbytes;
	uint64_t numel; /* of the storage: nbytes over the size of an element */
	uint32_t ndim;
	const int64_t *sizes, *strides;
};
int sfr_parts_tensor(struct sfr_parts *parts, const struct sfr_tensor *tensor);

/* A save of such a file to where `desc` says, which has no skeleton and no sources: from here on as any other (admit, capture, launch), but that nothing is
 * captured: SFR_WAIT_COPIED is the moment when the last source is written, and the bytes of the
 * sources stay as they are until the save has ended. The file's length is that of the parts, to the
 * byte. The parts are the save's when 0 is returned. -ENOMEM, -EINVAL, -EFBIG, SFR_EFORK. */
int sfr_save_new_parts(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		       struct sfr_parts *parts, struct sfr_ticket **out);

#endif
