/* stillframe core: the public header, and its manual.
 *
 * The core saves one image of memory to one file without stopping whoever owns
 * that memory. It is C11, knows neither Python nor torch, and never prints,
 * exits or aborts. Data flows one way:
 *
 *     plan (layout.c) -> stage (lane.c) -> write (write.c) -> commit (file.c, log.c)
 *
 * and the state of a save lives in one place, its ticket (ticket.c).
 *
 * Conventions
 *   - A function returns 0, or a negative code: -errno for what the operating
 *     system said, SFR_E* for what the core itself has to say (err.c).
 *   - sfr_x is public, sfr__x crosses files inside the core, static is local.
 *   - `_ns` are nanoseconds of CLOCK_MONOTONIC, `len`, `off`, `nbytes` are bytes,
 *     `nr_x` counts.
 *   - A call that may wait takes `slice_ns`: it waits at most that long and then
 *     returns SFR_EAGAIN; calling it again goes on where it stopped. The binding
 *     uses slices to answer signals. SFR_FOREVER waits without bound.
 *   - After fork() every object made before belongs to the parent: each call on
 *     one in the child returns SFR_EFORK and touches nothing.
 */
#ifndef SFR_H
#define SFR_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SFR_FOREVER UINT64_MAX

/* ---- errors (err.c) ---------------------------------------------------- */

/* One list, so that enum, name and message cannot drift apart. */
#define SFR_ERROR_LIST(X)                                                                          \
	X(SFR_EAGAIN, -1001, "the wait's time slice has passed")                                   \
	X(SFR_EBUSY, -1002, "as many saves are in flight as max_in_flight allows")                 \
	X(SFR_ECLOSED, -1003, "the engine is closed")                                              \
	X(SFR_EFORK, -1004, "the object belongs to the process that forked this one")              \
	X(SFR_ETORN, -1005, "a tensor changed between the call and its copy")                      \
	X(SFR_ECANCELLED, -1006, "the save was cancelled")                                         \
	X(SFR_ECORRUPT, -1007, "the file is damaged")                                              \
	X(SFR_EEXHAUSTED, -1008, "the pool is held by those who would have to wait")               \
	X(SFR_ESTATE, -1009, "the call does not fit the save's state")                             \
	X(SFR_ECAPTURING, -1010,                                                                   \
	  "a CUDA graph is being captured on the current stream: nothing can be saved until it ends")

enum sfr_code {
#define X(name, value, text) name = value,
	SFR_ERROR_LIST(X)
#undef X
};

/* What a save was doing when it failed; the text is SaveError.phase. */
#define SFR_PHASE_LIST(X)                                                                          \
	X(SFR_PHASE_NONE, "")                                                                      \
	X(SFR_PHASE_STAGE, "stage")                                                                \
	X(SFR_PHASE_OPEN, "open")                                                                  \
	X(SFR_PHASE_LOCK, "lock")                                                                  \
	X(SFR_PHASE_ALLOCATE, "allocate")                                                          \
	X(SFR_PHASE_WRITE, "write")                                                                \
	X(SFR_PHASE_SYNC, "sync")                                                                  \
	X(SFR_PHASE_RENAME, "rename")                                                              \
	X(SFR_PHASE_SYNC_DIR, "sync directory")                                                    \
	X(SFR_PHASE_REMOVE, "remove")                                                              \
	X(SFR_PHASE_READ, "read")

enum sfr_phase {
#define X(name, text) name,
	SFR_PHASE_LIST(X)
#undef X
		SFR_NR_PHASES
};

/* The first thing that went wrong; later ones do not replace it. */
struct sfr_err {
	int code;             /* 0, -errno or SFR_E* */
	enum sfr_phase phase; /* what was being done */
	int64_t index;        /* source that was torn, or -1 */
	char note[160];       /* one more fact, or "" */
};

const char *sfr_code_name(int code);    /* "SFR_ETORN", "EIO" style; never NULL */
const char *sfr_code_message(int code); /* never NULL */
const char *sfr_phase_name(enum sfr_phase phase);

/* ---- CRC-32 (crc.c) ---------------------------------------------------- */

/* zlib's CRC-32 (polynomial 0xedb88320): crc of `len` bytes appended to what
 * `crc` stands for; 0 starts. Any thread, no lock. */
uint32_t sfr_crc32(uint32_t crc, const void *buf, size_t len);
/* The same of `len` bytes while they are copied; `src` is read once. */
uint32_t sfr_crc32_copy(uint32_t crc, void *dst, const void *src, size_t len);
uint32_t sfr_crc32_portable(uint32_t crc, const void *buf, size_t len);
/* CRC of A followed by B, from crc(A), crc(B) and B's length. */
uint32_t sfr_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);
const char *sfr_crc32_name(void); /* which implementation serves sfr_crc32 */

/* ---- engine (engine.c) ------------------------------------------------- */

struct sfr_engine;
struct sfr_ticket;

struct sfr_engine_opts {
	uint64_t pool_bytes;    /* cap of the pool; 0 = the default cap */
	uint64_t block_bytes;   /* multiple of 4096, > 0 */
	uint32_t nr_writers;    /* >= 1 */
	uint32_t max_in_flight; /* >= 1 */
	uint32_t shared_memory; /* other processes can map the pool: sfr_snapshot_file */
};

struct sfr_stats {
	uint64_t pool_bytes, block_bytes;
	uint64_t committed_bytes; /* memory the pool holds from the system */
	uint64_t leased_bytes;    /* of it, handed out at this moment */
	uint64_t save_bytes;      /* of that, to saves; the rest is snapshots' */
	uint64_t retired_bytes;   /* of it, never to be used again */
	uint64_t saves_in_flight, saves_total;
};

/* Memory that a default pool may take: half of what the machine and the cgroup
 * leave, divided by LOCAL_WORLD_SIZE; what default pools already took is
 * subtracted (default caps share one budget). At least one block. */
uint64_t sfr_default_pool_bytes(uint64_t block_bytes);

/* Makes an engine; starts no thread yet. -EINVAL: an option out of range. With shared memory -errno of
 * memfd_create, and -EFBIG: RLIMIT_FSIZE is less than the pool. */
int sfr_engine_new(const struct sfr_engine_opts *opts, struct sfr_engine **out);
/* Waits for the engine's saves and for the process's removes, then stops its
 * threads and gives the pool back. New saves are refused from the first call on.
 * Idempotent. Saves still being captured by the calling thread are not waited
 * for (a signal handler may call this in the middle of one): then threads and
 * pool stay until the last of those has ended. */
int sfr_engine_close(struct sfr_engine *engine, uint64_t slice_ns);
void sfr_engine_put(struct sfr_engine *engine); /* drops the maker's reference; NULL is fine */
int sfr_engine_stats(struct sfr_engine *engine, struct sfr_stats *out);
int sfr_engine_warm_up(struct sfr_engine *engine, uint64_t nbytes);
int sfr_engine_trim(struct sfr_engine *engine);
/* For a process that uses CUDA: makes the lane of a device and has warm_up pin what it gives memory
 * to. 0, or -errno with a sentence in `why`. */
int sfr_engine_use_device(struct sfr_engine *engine, uint32_t device, char *why, size_t why_len);
/* A sentence on the CUDA driver and on devices that are dead. Loads the driver, never starts it. */
int sfr_engine_driver(struct sfr_engine *engine, char *text, size_t len);
/* Bounds of what a lane queues on a device: bytes of a piece, pieces in flight (0 = as they are).
 * For measurements and tests, while no save is in flight. */
void sfr_cuda_tune(uint64_t piece_bytes, uint64_t nr_in_flight);

/* ---- where a save goes (look.c) ---------------------------------------- */

#define SFR_PATH_MAX 4096 /* of Linux */
#define SFR_NAME_MAX 255

struct sfr_place {
	char parent[SFR_PATH_MAX];   /* real path of the directory */
	char name[SFR_NAME_MAX + 1]; /* last component; "" for the root */
	uint32_t mode;     /* of what stands there (st_mode; links are not followed), or 0 */
	uint32_t readable; /* the directory: what may not be read cannot be synced */
	uint64_t fs;       /* of the directory: st_dev */
};
/* Finds out where `path` leads, with a link in its last component followed or not. 0, or -errno: some
 * part of the path is missing, is no directory, or cannot be looked at. Blocks on file systems. */
int sfr_look(const char *path, int follow_link, struct sfr_place *place);

/* ---- one save (ticket.c) ----------------------------------------------- */

/* One storage: record data/<index> of the file. */
struct sfr_source {
	uint64_t addr; /* address of its bytes where they live; may be 0 when nbytes is 0 */
	uint64_t nbytes;
	uint32_t lane;   /* SFR_CAPTURED, or that a lane copies it later */
	uint32_t device; /* 0 = host memory; n = CUDA device n - 1 */
};
#define SFR_CAPTURED 0u
#define SFR_LANE_HOST 1u /* of the host for device 0, else of that device */

#define SFR_SAVE_DURABLE 1u /* sync file and directory */
#define SFR_SAVE_NESTED 2u  /* made inside another call of this thread: never waits for a slot */
#define SFR_SAVE_CHECK_BYTES 4u /* checksum each deferred byte in the call, compare when staged */
#define SFR_SAVE_NO_WAIT 8u     /* SFR_EBUSY instead of a wait for a slot */
#define SFR_SAVE_UNORDERED 16u  /* renamed once synced: no place in the log, and slots apart */

struct sfr_save_desc {
	const char *dir;      /* real path of the directory */
	const char *name;     /* file name in it */
	uint64_t fs;          /* its file system, as sfr_look says; 0 = not known */
	const void *skeleton; /* data.pkl; stays valid until the save is staged or has ended */
	uint64_t skeleton_len;
	const struct sfr_source *sources; /* copied; the bytes stay valid until staged or ended */
	uint32_t nr_sources;
	uint32_t flags;
};

/* A save's states, as SaveHandle.state names them. ticket.c has the diagram. */
#define SFR_STATE_LIST(X)                                                                          \
	X(SFR_NEW, "staging")        /* laid out; holds nothing yet */                             \
	X(SFR_CAPTURING, "staging")  /* has a slot; the call copies captured bytes */              \
	X(SFR_STAGING, "staging")    /* in the log; a lane copies deferred bytes */                \
	X(SFR_STAGED, "staged")      /* every byte copied, both detectors passed */                \
	X(SFR_WRITING, "writing")    /* every block written; tail and sync */                      \
	X(SFR_READY, "writing")      /* synced; waits for its turn in the log */                   \
	X(SFR_COMMITTING, "writing") /* being renamed: can no longer be cancelled */               \
	X(SFR_ENDING, "writing")     /* failed or cancelled; copies and writes run out */          \
	X(SFR_DURABLE, "durable")                                                                  \
	X(SFR_FAILED, "failed")                                                                    \
	X(SFR_CANCELLED, "cancelled")

enum sfr_state {
#define X(name, text) name,
	SFR_STATE_LIST(X)
#undef X
		SFR_NR_STATES
};
const char *sfr_state_name(enum sfr_state state);

/* Lays out the image of a save. No I/O, no wait. -ENOMEM, -EINVAL. */
int sfr_save_new(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		 struct sfr_ticket **out);

/* ---- a file made of parts (archive/parts.c, archive/tensor.c) ----------- */

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

/* ---- one save, continued (ticket.c) -------------------------------------- */

/* The caller's current stream on a device that sources live on. */
struct sfr_stream {
	uint64_t handle; /* CUstream */
	uint32_t device; /* the driver's number */
	uint32_t reserved;
};
/* Marks the state that is saved: an event on the caller's stream of each device, before which
 * nothing of the save is copied. Called before sfr_save_admit; without sources on devices it does
 * nothing. SFR_ECAPTURING where a stream is capturing a graph, SFR_ECLOSED: both end the ticket.
 * Any other failure (no driver, a dead device) becomes the ticket's own: 0 is returned, and the
 * save fails as soon as it is admitted. */
int sfr_save_begin(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams);
/* Takes one of the engine's max_in_flight slots and has a writer open the file.
 * SFR_EAGAIN, SFR_EBUSY (with SFR_SAVE_NO_WAIT), SFR_ECLOSED. A failure here ends the
 * ticket: only sfr_ticket_put may follow. */
int sfr_save_admit(struct sfr_ticket *t, uint64_t slice_ns);
/* Copies the captured sources, takes samples of the deferred ones. SFR_EAGAIN while it
 * waits for blocks; SFR_EEXHAUSTED when snapshots hold them all (then abandon the save). Other
 * failures become the ticket's own: 0 is returned. */
int sfr_save_capture(struct sfr_ticket *t, uint64_t slice_ns);
/* Appends the save to the process's log, unless unordered, and hands it to its lanes: the moment of
 * submission. Never waits. Fails only on SFR_ESTATE. */
int sfr_save_launch(struct sfr_ticket *t);
/* Gives a save up that was admitted but not launched (an exception in the caller). */
void sfr_save_abandon(struct sfr_ticket *t);

enum sfr_wait_for { SFR_WAIT_COPIED, SFR_WAIT_STAGED, SFR_WAIT_ENDED };
/* Waits until every deferred byte is copied (the sources are no longer read); until staged;
 * or until the save has ended. An ended save satisfies all three. Returns 0 or SFR_EAGAIN. A slice
 * of zero never sleeps, and for the end it takes no lock either. */
int sfr_save_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t slice_ns);
/* Whether that is known without a lock. Python asks with the interpreter lock held, and whoever has
 * the engine's may be a niced thread that another process keeps from running. */
int sfr_save_reached(const struct sfr_ticket *t, enum sfr_wait_for what);
/* The gate of the next step. Host sources: waits until they are copied, as SFR_WAIT_COPIED does.
 * Sources on devices: has their copies queued, all of them, and these streams of the calling
 * thread wait for them; the host waits only while blocks are wanting, where a stream is capturing
 * a graph, or where a device has no stream in the list. 0, SFR_EAGAIN; call it again then. */
int sfr_save_gate(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams,
		  uint64_t slice_ns);
/* The caller's verdict on what the core cannot see (tensor version counters): given once,
 * after SFR_WAIT_COPIED or sfr_save_gate. torn_index < 0 passes; otherwise the save fails with SFR_ETORN.
 * A second verdict is ignored and SFR_ESTATE returned. */
int sfr_save_confirm(struct sfr_ticket *t, int64_t torn_index);
/* 1: the save will end as cancelled (or already has); 0: too late. */
int sfr_save_cancel(struct sfr_ticket *t);

#define SFR_IO_UNKNOWN 0u
#define SFR_IO_DIRECT 1u
#define SFR_IO_BUFFERED 2u

struct sfr_report {
	enum sfr_state state;
	struct sfr_err err;
	uint64_t nbytes; /* length of the file */
	uint64_t captured_nbytes, deferred_nbytes;
	uint64_t written_nbytes; /* of nbytes, so far */
	uint64_t peak_pool_bytes;
	uint64_t slot_wait_ns;  /* in sfr_save_admit */
	uint64_t block_wait_ns; /* in sfr_save_capture, for blocks */
	uint64_t created_ns, launched_ns, copied_ns, staged_ns, ended_ns; /* 0 = not yet */
	uint32_t io_mode;                                                 /* SFR_IO_* */
	uint32_t over_slots;   /* 1: a nested save beyond max_in_flight */
	char fallback[4][160]; /* sentences, "" when unused */
};
int sfr_save_report(struct sfr_ticket *t, struct sfr_report *out);
/* These two never wait, not even for a lock. 0 or SFR_EFORK. `staged`: it is, and has not failed. */
int sfr_save_state(const struct sfr_ticket *t, enum sfr_state *state, int *staged);
int sfr_save_progress(const struct sfr_ticket *t, uint64_t *written_nbytes, uint64_t *nbytes);
uint64_t sfr_ticket_seq(const struct sfr_ticket *t);
uint64_t sfr_ticket_number(const struct sfr_ticket *t); /* from 1, of the process; trace.h */

void sfr_ticket_get(struct sfr_ticket *t);
void sfr_ticket_put(struct sfr_ticket *t); /* NULL is fine */

/* ---- glances at memory of a device --------------------------------------------------------------- */

/* Three lines of each of some storages on one device, copied down twice: after a step, and before the
 * next. Whether they are the same is known some time later; nobody waits for the device. A glance
 * is used by one thread at a time. */
struct sfr_glance;
struct sfr_glance_at {
	uint64_t addr, nbytes; /* fewer bytes than three lines: passed over */
};
/* -ENODEV, -EIO: the device cannot be looked at; -ENOMEM. */
int sfr_glance_new(uint32_t device, struct sfr_glance **out);
/* May be called at any time; NULL is fine. */
void sfr_glance_free(struct sfr_glance *look);
/* Queues the copies behind what is on `stream`, a stream of the glance's device, which then waits for
 * them. `again`: the second time, of the same storages in the same order; such as are not wanted any
 * more are given with no bytes. SFR_EBUSY: nothing was queued, because another thread is looking or
 * the glance before has not landed; SFR_ECAPTURING, SFR_EFORK; -EIO: never again. */
int sfr_glance_take(struct sfr_glance *look, uint64_t stream, const struct sfr_glance_at *at,
		    uint32_t nr, int again);
/* 1: all of it has landed; 0: not yet; -EIO, SFR_EFORK: it never will. */
int sfr_glance_landed(struct sfr_glance *look);
/* Once it has landed, twice: whether storage number i was the same both times. */
int sfr_glance_same(const struct sfr_glance *look, uint32_t i);

/* ---- snapshots (snapshot.c) --------------------------------------------- */

/* A copy of host memory, and of memory of devices, in memory of the engine's pool. Sources are rows of struct sfr_source, as
 * for a save: captured ones are copied by sfr_snapshot_start, the others by their lane. A source
 * with nbytes but no address gets its memory and is filled by the caller.
 *
 * The memory goes back when the copy has ended, every view of it is closed and every hold has
 * ended; at the latest with the last reference. */
struct sfr_snapshot;

/* Children that are forked later have the memory, as it is at the fork: so not of an engine with
 * shared memory, whose later bytes they would see (-EINVAL). */
#define SFR_SNAPSHOT_SHARED 1u
/* What leaves a device: callers' streams do not wait, so sources on devices stay as they are until
 * the wait is over, or a stream has been through the gate. Copies begin SFR_APART bytes apart. */
#define SFR_SNAPSHOT_LEAVES 2u
#define SFR_APART 512u

/* Leases nothing yet; the rows are copied. -ENOMEM, -EINVAL, SFR_EFORK. */
int sfr_snapshot_new(struct sfr_engine *engine, const struct sfr_source *sources,
		     uint32_t nr_sources, uint32_t flags, struct sfr_snapshot **out);
/* Leases the memory; the caller has one view of it then. SFR_EAGAIN: saves have to give some back, call it again; SFR_EEXHAUSTED: what
 * snapshots hold leaves too little; SFR_ECLOSED; -ENOMEM; -errno. */
int sfr_snapshot_lease(struct sfr_snapshot *s, uint64_t slice_ns);
/* For sources on devices, before the start: the caller's current stream on each. SFR_ESTATE: one of
 * the devices has none in the list. */
int sfr_snapshot_streams(struct sfr_snapshot *s, const struct sfr_stream *streams,
			 uint32_t nr_streams);
/* Copies the captured sources, takes samples of the others and hands these to the lane. Bytes of
 * deferred sources stay valid until sfr_snapshot_wait has returned 0. A failure (-ENOMEM, -errno)
 * leaves nothing to wait for.
 * Sources on devices, captured ones too, are copied by these: all is queued in the call, the
 * caller's stream waits for the captured ones, and their bytes stay valid until the wait is over.
 * SFR_ECAPTURING where a stream is capturing a graph. After any failure with such sources
 * something may still be copied: sfr_snapshot_wait says when that is over, sfr_snapshot_error what
 * went wrong. */
int sfr_snapshot_start(struct sfr_snapshot *s);
/* Waits until every byte is copied, or the copy was given up because nobody could read it any
 * more; *torn gets the number of a source that changed meanwhile, or -1. 0 or SFR_EAGAIN. A slice of
 * zero takes no lock. */
int sfr_snapshot_wait(struct sfr_snapshot *s, uint64_t slice_ns, int64_t *torn);
/* The gate of the next step, as sfr_save_gate. 0, SFR_EAGAIN. */
int sfr_snapshot_gate(struct sfr_snapshot *s, const struct sfr_stream *streams, uint32_t nr_streams,
		      uint64_t slice_ns);
/* What a device failed with; code 0: nothing. Final once the wait is over. */
void sfr_snapshot_error(struct sfr_snapshot *s, struct sfr_err *out);
/* The memory: one range that holds every source's copy (and may hold memory of others between
 * them), and the offset of each copy in it. Valid after sfr_snapshot_lease. */
void sfr_snapshot_memory(const struct sfr_snapshot *s, char **base, uint64_t *len);
uint64_t sfr_snapshot_offset(const struct sfr_snapshot *s, uint32_t source);
/* For another process that is to map that range: the file that it is of, and where in it it begins,
 * a multiple of 4096. The descriptor is the engine's, and stays as long as the memory is leased.
 * SFR_ESTATE: the engine has no shared memory, or nothing is leased. */
int sfr_snapshot_file(struct sfr_snapshot *s, int *fd, uint64_t *off);
/* A view keeps the memory, and so does a hold. While there is a view, a wait for the memory is
 * one that only the caller could end. SFR_ESTATE when the memory has gone back. */
int sfr_snapshot_view(struct sfr_snapshot *s);
void sfr_snapshot_unview(struct sfr_snapshot *s);
int sfr_snapshot_hold(struct sfr_snapshot *s);
void sfr_snapshot_unhold(struct sfr_snapshot *s);
/* Its views end by themselves, whatever the caller does: others wait for the memory while `yes`. */
void sfr_snapshot_will_return(struct sfr_snapshot *s, int yes);
/* 1 while the memory is leased, else 0; SFR_EFORK. */
int sfr_snapshot_leased(struct sfr_snapshot *s);
uint64_t sfr_snapshot_copying_ns(const struct sfr_snapshot *s); /* devices', of what leaves */
uint64_t sfr_snapshot_number(const struct sfr_snapshot *s);     /* from 1, of the process */
void sfr_snapshot_get(struct sfr_snapshot *s);
void sfr_snapshot_put(struct sfr_snapshot *s); /* NULL is fine */

/* ---- the process's ordered log (log.c) --------------------------------- */

/* A key is the real path of the parent, a slash, and the last component.
 * A remove runs when every save submitted before it has ended, and only if the last of them
 * became durable (without SFR_SAVE_DURABLE: was renamed); with no save before it, it runs.
 * Directories are removed with what is in them. `seq_out` may be NULL. */
int sfr_log_remove(const char *key, uint64_t *seq_out);
/* What the name will be when the log has run out: 1 there (a save of it is pending), 0 gone
 * (a remove of it or of a parent is pending), -1 no entry says: ask the file system. */
int sfr_log_exists(const char *key);
/* Waits until no save or remove of `key` submitted up to now is pending; then opens it for
 * reading, in the log's order: *fd_out >= 0, or returns -errno of open. */
struct sfr_log_load;
int sfr_log_load_new(const char *key, struct sfr_log_load **out);
int sfr_log_load_wait(struct sfr_log_load *load, uint64_t slice_ns, int *fd_out);
void sfr_log_load_free(struct sfr_log_load *load);
/* Waits until everything submitted up to the first call with *seq == 0 has ended; *seq keeps
 * the place between slices. */
int sfr_log_drain(uint64_t *seq, uint64_t slice_ns);
/* Saves and removes not yet ended. */
uint64_t sfr_log_pending(void);
/* Is there something pending whose file system has not answered for 20 s? 1, with a sentence that
 * names it in `text`, or 0. What is saved to others and ready does not wait for it. */
int sfr_log_unanswered(char *text, size_t len);
/* For tests: how long a file system may take before it is set aside; 0 = as ever. */
void sfr_log_tune(uint64_t patience_ns);
/* Ends the log's threads once the log has run out and no save is between admit and launch; the next
 * save or remove starts one again. */
int sfr_log_stop(void);

/* ---- work done elsewhere, in the log's order (work.c) -------------------- */

/* An entry whose work somebody outside the core does: a link, a save or a remove by other code.
 * It blocks the log from the moment it is at the head until sfr_log_work_end, so everything
 * submitted before it has ended by then, and nothing submitted after it has begun to take effect.
 * Loads and sfr_log_exists see it as they see saves and removes. */
enum sfr_work_kind { SFR_WORK_SAVE, SFR_WORK_REMOVE, SFR_WORK_LINK };
struct sfr_log_work;
/* Makes an entry with one reference, the caller's; it is in no log yet. -ENOMEM, -EINVAL. */
int sfr_log_work_new(const char *key, enum sfr_work_kind kind, struct sfr_log_work **out);
/* Submits it: once. Never waits. */
int sfr_log_work_append(struct sfr_log_work *work);
uint64_t sfr_log_work_number(const struct sfr_log_work *work); /* from 1, of the process */
/* Waits until an entry of this kind is at the head and says its number, each once. *after_good is 0
 * when the last save before it failed. SFR_EAGAIN; SFR_ECLOSED when the log is being stopped. */
int sfr_log_work_next(uint64_t slice_ns, uint64_t *number, int *after_good);
/* The work has ended, well (`ok`) or not; a save that did not holds back removes as any other.
 * Later calls change nothing. */
void sfr_log_work_end(struct sfr_log_work *work, int ok);
/* Drops the caller's reference; what was appended and not ended ends as failed. NULL is fine. */
void sfr_log_work_put(struct sfr_log_work *work);

/* ---- notices (notice.c) ------------------------------------------------ */

#define SFR_NOTICE_COPIED 1u   /* every byte copied: give sfr_save_confirm, let sources go */
#define SFR_NOTICE_ENDED 2u    /* slot, blocks and state are settled */
#define SFR_NOTICE_TEXT 3u     /* a sentence for the log: a remove dropped, a foreign temporary */
#define SFR_NOTICE_STOP 4u     /* sfr_notice_stop was called */
#define SFR_NOTICE_SNAPSHOT 5u /* a snapshot's lane has ended */

struct sfr_notice {
	unsigned what;                 /* SFR_NOTICE_* */
	uint64_t number;               /* of the save or snapshot: no other ever has it */
	struct sfr_ticket *ticket;     /* COPIED and ENDED: with a reference */
	struct sfr_snapshot *snapshot; /* SNAPSHOT: with a reference */
	char text[1024];               /* TEXT, else "" */
};
/* Takes the next notice. */
int sfr_notice_wait(struct sfr_notice *out, uint64_t slice_ns);
void sfr_notice_stop(void); /* wakes every waiter with SFR_NOTICE_STOP, once each */

/* ---- reading back (check.c) --------------------------------------------- */

/* See check/check.h: sfr_check_new, sfr_check_run and the result. */

/* ---- fork (fork.c) ----------------------------------------------------- */

/* Installs the fork handlers, once per process; every sfr_engine_new calls it. */
int sfr_fork_init(void);
/* Counts the forks between the first process and this one: objects remember it. */
uint64_t sfr_fork_generation(void);

#endif
