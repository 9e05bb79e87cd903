/* Probes of device memory, which find out whether a storage changes between two optimizer steps.
 *
 * The host cannot read device memory. So three cache lines of each storage are copied to the host,
 * after a step and before the next. The two copies are compared when both have completed:
 *
 *     caller's stream   step | waits  forward, backward  | waits  step ...
 *     prober's stream          \ lines /                   \ lines /   done?  same?
 *
 * The caller's stream waits for the copies. The host does not wait: it asks later whether they have
 * completed.
 *
 * Each device has one *prober*, which owns the stream for the copies and lives as long as the
 * process. One thread at a time uses a prober. A second thread gets SFR_EBUSY, because the first
 * may be waiting for room on the stream.
 *
 * After an error a prober is closed for good. Storages without a result are captured instead of
 * deferred, which is only slower. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "sfr/probe.h"
#include "base/base.h"
#include "device/lane.h"

enum { NR_ROUNDS = 2 };               /* of copies: after a step, and before the next */
enum { NR_LINES = 3, LINE_LEN = 64 }; /* cache lines to copy of a storage; bytes of a line */

struct prober {
	struct prober *next;

	/* constant */
	uint32_t device;
	uint64_t fork_generation;
	const struct sfr__cuda_api *cu;
	CUcontext context;
	CUstream stream;

	/* guarded by probers.mu, which is not held during calls of the driver */
	bool busy;                    /* a thread uses the prober */
	bool closed;                  /* an error has occurred */
	struct sfr_probe *tombstones; /* freed by their users; copies may still write to them */
};

struct sfr_probe {
	struct sfr_probe *next; /* the next in the list of tombstones */
	struct prober *prober;
	CUevent ready; /* on the caller's stream, before the copies */
	CUevent done;  /* on the prober's stream, after the copies */
	struct sfr__cuda_host_buffer
		store;               /* the lines of the first round, then those of the second */
	struct sfr__cuda_rows *rows; /* the copies to queue */
	uint32_t capacity, nr;       /* storages that the memory is for; storages of this round */
	bool in_flight;              /* copies were queued and may not have completed */
};

static struct {
	struct sfr__mutex mu;
	struct prober *head; /* new probers are added, and none is removed */
} probers = { .mu = SFR__MUTEX(SFR__LOCK_PROBERS) };

/* ---- probers ------------------------------------------------------------------------ */

static bool is_closed(struct prober *prober)
{
	return sfr__under(&probers.mu, prober->closed);
}

/* Closes the prober for good, because `call` has failed with `rc`. Logs its first error. */
static void mark_prober_closed(struct prober *prober, const char *call, CUresult rc)
{
	char text[160];
	bool first;

	sfr__lock(&probers.mu);
	first = !prober->closed;
	prober->closed = true;
	sfr__unlock(&probers.mu);
	sfr__cuda_format_error(prober->cu, prober->device, call, rc, text, sizeof(text));
	/* at the process's end the driver is deinitialised: no news for the user */
	if (first && (int)rc != CUDA_ERROR_DEINITIALIZED)
		sfr__notice_post_text(
			"%s: from now on, saves copy during the call every tensor that is "
			"not yet known to change only in optimizer steps",
			text);
}

/* Makes the prober's stream. Returns 0 or -errno. */
static int open_prober(struct prober *prober)
{
	char why[160]; /* not reported: the caller can do without a prober */

	prober->cu = sfr__cuda_get_or_init_driver(NULL, 0);
	if (!prober->cu)
		return -ENODEV;
	return sfr__cuda_open_context_and_stream(prober->cu, prober->device, &prober->context,
						 &prober->stream, why, sizeof(why));
}

/* Returns the device's prober, or NULL. Probers made before a fork do not count. */
static struct prober *find_prober_locked(uint32_t device)
{
	for (struct prober *prober = probers.head; prober; prober = prober->next)
		if (prober->device == device && prober->fork_generation == sfr_fork_generation())
			return prober;
	return NULL;
}

/* Gets or makes the device's prober. Returns 0 or -errno. */
static int get_or_make_prober(uint32_t device, struct prober **out)
{
	struct prober *new_prober;
	int rc;

	sfr__lock(&probers.mu);
	*out = find_prober_locked(device);
	sfr__unlock(&probers.mu);
	if (*out)
		return 0;
	new_prober = sfr_sys.calloc(1, sizeof(*new_prober));
	if (!new_prober)
		return -ENOMEM;
	new_prober->device = device;
	new_prober->fork_generation = sfr_fork_generation();
	rc = open_prober(new_prober);
	if (rc < 0) {
		sfr_sys.free(new_prober);
		return rc;
	}
	sfr__lock(&probers.mu);
	*out = find_prober_locked(device);
	if (!*out) {
		new_prober->next = probers.head;
		probers.head = *out = new_prober;
		new_prober = NULL;
	}
	sfr__unlock(&probers.mu);
	if (new_prober) { /* another thread was first; the stream of `new_prober` has no work */
		(void)new_prober->cu->stream_free(new_prober->stream);
		sfr__cuda_release_primary_context(new_prober->cu, device);
		sfr_sys.free(new_prober);
	}
	return 0;
}

/* Marks the prober as used by this thread. Returns false if it is closed or another thread uses
 * it. */
static bool try_acquire_prober(struct prober *prober)
{
	bool available;

	sfr__lock(&probers.mu);
	available = !prober->busy && !prober->closed;
	if (available)
		prober->busy = true;
	sfr__unlock(&probers.mu);
	return available;
}

static void release_prober(struct prober *prober)
{
	sfr__lock(&probers.mu);
	prober->busy = false;
	sfr__unlock(&probers.mu);
}

/* ---- probes; static functions are called with the prober's context current ---------- */

static void destroy_probe(struct sfr_probe *probe)
{
	const struct sfr__cuda_api *cu = probe->prober->cu;

	/* a failure only leaks an event */
	if (probe->ready)
		(void)cu->event_free(probe->ready);
	if (probe->done)
		(void)cu->event_free(probe->done);
	sfr__cuda_host_buffer_free(cu, &probe->store);
	sfr_sys.free(probe->rows);
	sfr_sys.free(probe);
}

/* Returns whether the probe's copies have completed. Closes the prober after an error. */
static bool poll_probe_completion(struct sfr_probe *probe)
{
	CUresult rc = probe->in_flight ? probe->prober->cu->event_query(probe->done) : CUDA_SUCCESS;

	if (rc == CUDA_SUCCESS)
		probe->in_flight = false;
	else if (rc != CUDA_ERROR_NOT_READY)
		mark_prober_closed(probe->prober, "cuEventQuery", rc);
	return rc == CUDA_SUCCESS;
}

/* Keeps a probe that its user has freed, because copies may still write to its memory. */
static void add_tombstone(struct prober *prober, struct sfr_probe *probe)
{
	sfr__lock(&probers.mu);
	probe->next = prober->tombstones;
	prober->tombstones = probe;
	sfr__unlock(&probers.mu);
}

/* Frees the tombstones whose copies have completed. */
static void free_completed_tombstones(struct prober *prober)
{
	struct sfr_probe *probe, *next;

	sfr__lock(&probers.mu);
	probe = prober->tombstones;
	prober->tombstones = NULL;
	sfr__unlock(&probers.mu);
	for (; probe; probe = next) {
		next = probe->next;
		if (poll_probe_completion(probe))
			destroy_probe(probe);
		else
			add_tombstone(prober, probe);
	}
}

int sfr_probe_new(uint32_t device, struct sfr_probe **out)
{
	struct sfr_probe *probe = sfr_sys.calloc(1, sizeof(*probe));
	int rc;

	*out = NULL;
	if (!probe)
		return -ENOMEM;
	rc = get_or_make_prober(device, &probe->prober);
	if (rc < 0)
		sfr_sys.free(probe);
	else
		*out = probe;
	return rc;
}

void sfr_probe_free(struct sfr_probe *probe)
{
	struct sfr__cuda_scope scope;
	struct prober *prober;

	if (!probe || probe->prober->fork_generation != sfr_fork_generation())
		return; /* a forked child cannot use the driver, so it leaks the probe */
	prober = probe->prober;
	add_tombstone(prober, probe);
	/* If another thread uses the prober, a later probe frees this one. If the prober is closed,
	 * a copy may run forever, so the memory stays. */
	if (!try_acquire_prober(prober))
		return;
	if (sfr__cuda_enter(&scope, prober->cu, prober->context) == CUDA_SUCCESS) {
		free_completed_tombstones(prober);
		sfr__cuda_leave(&scope);
	}
	release_prober(prober);
}

/* Makes memory and events for `nr` storages, unless the probe has them. Called while no copy is in
 * flight. */
static CUresult ensure_probe_capacity(struct sfr_probe *probe, uint32_t nr)
{
	const struct sfr__cuda_api *cu = probe->prober->cu;
	CUresult rc = CUDA_SUCCESS;

	if (!probe->ready)
		rc = cu->event_new(&probe->ready, CU_EVENT_DISABLE_TIMING);
	if (rc == CUDA_SUCCESS && !probe->done)
		rc = cu->event_new(&probe->done, CU_EVENT_DISABLE_TIMING);
	if (rc != CUDA_SUCCESS || nr <= probe->capacity)
		return rc; /* a failure, or there is enough memory already */
	sfr__cuda_host_buffer_free(cu, &probe->store);
	sfr_sys.free(probe->rows);
	probe->capacity = 0;
	probe->rows = sfr_sys.malloc(nr * sizeof(*probe->rows));
	if (!probe->rows ||
	    sfr__cuda_host_buffer_new(cu, NR_ROUNDS * (size_t)nr * NR_LINES * LINE_LEN,
				      &probe->store) < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	/* Queueing a copy to pageable memory would wait for the device. */
	if (!probe->store.pinned)
		return CUDA_ERROR_OUT_OF_MEMORY;
	probe->capacity = nr;
	return CUDA_SUCCESS;
}

/* Returns the memory for the lines of storage `i` that are copied in the first or second round. */
static char *lines_of(const struct sfr_probe *probe, uint32_t i, bool second_round)
{
	const size_t first = second_round ? probe->capacity : 0;

	return (char *)probe->store.mem + (first + i) * NR_LINES * LINE_LEN;
}

/* Sets up one copy for each storage that is long enough: its first, middle and last line, as rows
 * at equal distances. Returns the number of copies. */
static uint32_t set_up_rows(struct sfr_probe *probe, const struct sfr_probe_range *ranges,
			    uint32_t nr, bool second_round)
{
	uint32_t nr_rows = 0;

	for (uint32_t i = 0; i < nr; i++) {
		if (ranges[i].nbytes < NR_LINES * LINE_LEN)
			continue;
		probe->rows[nr_rows++] = (struct sfr__cuda_rows){
			.dst = lines_of(probe, i, second_round),
			.src = ranges[i].addr,
			.width = LINE_LEN,
			.nr = NR_LINES,
			.pitch = (ranges[i].nbytes - LINE_LEN) / (NR_LINES - 1),
		};
	}
	return nr_rows;
}

/* Queues the copies in one call (batched), or one by one if the driver refuses that. */
static CUresult queue_rows(struct prober *prober, const struct sfr__cuda_rows *rows, uint32_t nr)
{
	CUresult rc = sfr__cuda_queue_rows(prober->cu, prober->stream, rows, nr, LINE_LEN, true);

	if (rc == CUDA_ERROR_NOT_SUPPORTED || rc == CUDA_ERROR_INVALID_VALUE)
		rc = sfr__cuda_queue_rows(prober->cu, prober->stream, rows, nr, LINE_LEN, false);
	return rc;
}

/* Queues the copies on the prober's stream, between the caller's earlier and later work. */
static CUresult queue_copies(struct sfr_probe *probe, CUstream stream, uint32_t nr_rows)
{
	struct prober *prober = probe->prober;
	CUresult rc = prober->cu->event_record(probe->ready, stream);

	if (rc == CUDA_SUCCESS)
		rc = prober->cu->stream_wait(prober->stream, probe->ready, 0);
	if (rc == CUDA_SUCCESS) {
		probe->in_flight = true;
		rc = queue_rows(prober, probe->rows, nr_rows);
	}
	if (rc == CUDA_SUCCESS)
		rc = prober->cu->event_record(probe->done, prober->stream);
	if (rc == CUDA_SUCCESS)
		rc = prober->cu->stream_wait(stream, probe->done, 0);
	return rc;
}

/* Queues the first or second round of copies. Returns what sfr_probe_queue_copies returns. */
static int queue_probe_round(struct sfr_probe *probe, CUstream stream,
			     const struct sfr_probe_range *ranges, uint32_t nr, bool second_round)
{
	struct prober *prober = probe->prober;
	CUresult rc = CUDA_SUCCESS;
	uint32_t nr_rows;

	if (sfr__cuda_is_capturing(prober->cu, stream))
		return SFR_ECAPTURING;
	free_completed_tombstones(prober);
	/* the second round uses the memory and the events of the first */
	if (!second_round) {
		if (!poll_probe_completion(probe)) /* the memory is still being written */
			return SFR_EBUSY;
		rc = ensure_probe_capacity(probe, nr);
	}
	if (rc == CUDA_SUCCESS) {
		probe->nr = nr;
		nr_rows = set_up_rows(probe, ranges, nr, second_round);
		if (nr_rows > 0)
			rc = queue_copies(probe, stream, nr_rows);
	}
	if (rc == CUDA_SUCCESS)
		return 0;
	mark_prober_closed(prober, "a probe of the device", rc);
	return -EIO;
}

int sfr_probe_queue_copies(struct sfr_probe *probe, uint64_t stream,
			   const struct sfr_probe_range *ranges, uint32_t nr, int again)
{
	struct prober *prober = probe->prober;
	struct sfr__cuda_scope scope;
	CUresult rc;
	int ret;

	if (prober->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (nr == 0 || (again && nr != probe->nr))
		return -EINVAL;
	if (!try_acquire_prober(prober))
		return is_closed(prober) ? -EIO : SFR_EBUSY;
	rc = sfr__cuda_enter(&scope, prober->cu, prober->context);
	if (rc == CUDA_SUCCESS) {
		ret = queue_probe_round(probe, (CUstream)(uintptr_t)stream, ranges, nr, again != 0);
		sfr__cuda_leave(&scope);
	} else {
		mark_prober_closed(prober, "cuCtxPushCurrent", rc);
		ret = -EIO;
	}
	release_prober(prober);
	return ret;
}

int sfr_probe_is_done(struct sfr_probe *probe)
{
	struct sfr__cuda_scope scope;
	bool done;

	if (probe->prober->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (is_closed(probe->prober) ||
	    sfr__cuda_enter(&scope, probe->prober->cu, probe->prober->context) != CUDA_SUCCESS)
		return -EIO;
	done = poll_probe_completion(probe);
	sfr__cuda_leave(&scope);
	return is_closed(probe->prober) ? -EIO : done;
}

int sfr_probe_is_unchanged(const struct sfr_probe *probe, uint32_t i)
{
	const char *first = lines_of(probe, i, false);
	const char *second = lines_of(probe, i, true);

	return memcmp(first, second, NR_LINES * LINE_LEN) == 0;
}
