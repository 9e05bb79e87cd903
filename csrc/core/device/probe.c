/* Probes of device memory, which find out whether a storage changes between two optimizer steps.
 *
 * The observer of an optimizer (csrc/python/observer) has to compare a storage's bytes after a step
 * with its bytes before the next step, and the host cannot read device memory. So three cache lines
 * of each storage are copied to the host at both times. The two copies are compared when both have
 * completed:
 *
 *     caller's stream   step | waits  forward, backward  | waits  step ...
 *     prober's stream          \ lines /                   \ lines /   done?  same?
 *
 * The caller's stream waits for the copies, but the host does not. The host asks later whether they
 * have completed, because the device runs some time after the host.
 *
 * Each device of the process has one prober: the stream on which its lines are copied. A prober
 * lives as long as the process. One thread at a time uses a prober. A second thread does not wait,
 * because the first thread may be waiting for room on the stream: it gets SFR_EBUSY and probes
 * after its next step. The lock is not held during calls of the driver.
 *
 * A storage without a result is captured instead of deferred, which is only slower. So after an
 * error a prober is closed for good, and the error is logged. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "sfr/probe.h"
#include "base/base.h"
#include "device/lane.h"

enum { LINES = 3, LINE = 64 }; /* cache lines of a storage; bytes of a line */

/* The stream of a device's probes. */
struct prober {
	struct prober *next;
	uint32_t device; /* constant, like the next four */
	uint64_t fork_generation;
	const struct sfr__cuda *cu;
	CUcontext context;
	CUstream stream;
	/* guarded by probers.mu */
	bool busy, closed;
	/* probes that their users have freed, but to which a running copy may still write */
	struct sfr_probe *tombstones;
};

struct sfr_probe {
	struct sfr_probe *next; /* the next in the list of tombstones */
	struct prober *prober;
	/* `ready` is recorded on the caller's stream before the copies, and `done` on the prober's
	 * stream after the copies */
	CUevent ready, done;
	/* LINES lines of each storage from the first round of copies, then from the second round */
	struct sfr__cuda_store store;
	struct sfr__cuda_rows *rows; /* the copies to queue */
	uint32_t room, nr;           /* how many storages fit, and how many the current round has */
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

/* Closes the prober for good after `call` has failed with `rc`. Only the first call logs the
 * error. */
static void close_prober(struct prober *prober, const char *call, CUresult rc)
{
	char text[160];
	bool first;

	sfr__lock(&probers.mu);
	first = !prober->closed;
	prober->closed = true;
	sfr__unlock(&probers.mu);
	sfr__cuda_explain(prober->cu, prober->device, call, rc, text, sizeof(text));
	if (first && (int)rc != CUDA_ERROR_DEINITIALIZED)
		sfr__notice_text("%s: what is not known to change in steps only is copied in the "
				 "call from now on",
				 text);
}

/* Makes the prober's stream. Returns 0 or -errno. */
static int open_prober(struct prober *prober)
{
	char why[160];

	prober->cu = sfr__cuda_get(NULL, 0);
	if (!prober->cu)
		return -ENODEV;
	return sfr__cuda_open(prober->cu, prober->device, &prober->context, &prober->stream, why,
			      sizeof(why));
}

/* Returns the device's prober in this process, or NULL. Probers made before a fork do not count. */
static struct prober *find_prober_locked(uint32_t device)
{
	for (struct prober *prober = probers.head; prober; prober = prober->next)
		if (prober->device == device && prober->fork_generation == sfr_fork_generation())
			return prober;
	return NULL;
}

/* Sets *out to the device's prober, which is made at its first use. Returns 0 or -errno. */
static int get_prober(uint32_t device, struct prober **out)
{
	struct prober *made;
	int rc;

	sfr__lock(&probers.mu);
	*out = find_prober_locked(device);
	sfr__unlock(&probers.mu);
	if (*out)
		return 0;
	made = sfr_sys.calloc(1, sizeof(*made));
	if (!made)
		return -ENOMEM;
	made->device = device;
	made->fork_generation = sfr_fork_generation();
	rc = open_prober(made);
	if (rc < 0) {
		sfr_sys.free(made);
		return rc;
	}
	sfr__lock(&probers.mu);
	*out = find_prober_locked(device);
	if (!*out) {
		made->next = probers.head;
		probers.head = *out = made;
		made = NULL;
	}
	sfr__unlock(&probers.mu);
	if (made) { /* another thread was first; the stream of `made` has no work */
		(void)made->cu->stream_free(made->stream);
		sfr__cuda_release(made->cu, device);
		sfr_sys.free(made);
	}
	return 0;
}

/* Takes the prober for this thread. Returns false if another thread uses it, or it is closed. */
static bool take_prober(struct prober *prober)
{
	bool free;

	sfr__lock(&probers.mu);
	free = !prober->busy && !prober->closed;
	if (free)
		prober->busy = true;
	sfr__unlock(&probers.mu);
	return free;
}

/* Gives the prober back, so that another thread can take it. */
static void give_prober(struct prober *prober)
{
	sfr__lock(&probers.mu);
	prober->busy = false;
	sfr__unlock(&probers.mu);
}

/* ---- probes ------------------------------------------------------------------------ */

/* Frees a probe. The prober's context must be current. */
static void destroy_probe(struct sfr_probe *probe)
{
	const struct sfr__cuda *cu = probe->prober->cu;

	/* If this fails, nothing can be done. */
	if (probe->ready)
		(void)cu->event_free(probe->ready);
	if (probe->done)
		(void)cu->event_free(probe->done);
	sfr__cuda_store_free(cu, &probe->store);
	sfr_sys.free(probe->rows);
	sfr_sys.free(probe);
}

/* Asks the driver whether the probe's copies have completed, and returns the answer. Closes the
 * prober if the driver returns an error. The prober's context must be current. */
static bool query_probe(struct sfr_probe *probe)
{
	CUresult rc = probe->in_flight ? probe->prober->cu->event_query(probe->done) : CUDA_SUCCESS;

	if (rc == CUDA_SUCCESS)
		probe->in_flight = false;
	else if (rc != CUDA_ERROR_NOT_READY)
		close_prober(probe->prober, "cuEventQuery", rc);
	return rc == CUDA_SUCCESS;
}

/* Adds a probe that its user has freed to the tombstones, from which free_tombstones frees it
 * later. */
static void add_tombstone(struct prober *prober, struct sfr_probe *probe)
{
	sfr__lock(&probers.mu);
	probe->next = prober->tombstones;
	prober->tombstones = probe;
	sfr__unlock(&probers.mu);
}

/* Frees the tombstones whose copies have completed. The calling thread must have taken the prober,
 * and its context must be current. */
static void free_tombstones(struct prober *prober)
{
	struct sfr_probe *probe, *next;

	sfr__lock(&probers.mu);
	probe = prober->tombstones;
	prober->tombstones = NULL;
	sfr__unlock(&probers.mu);
	for (; probe; probe = next) {
		next = probe->next;
		if (query_probe(probe))
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
	rc = get_prober(device, &probe->prober);
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
		return;
	prober = probe->prober;
	add_tombstone(prober, probe);
	/* If another thread has the prober, the next probe of the device frees this one. If the
	 * prober is closed, a copy may still run, and the memory stays until the process ends. */
	if (!take_prober(prober))
		return;
	if (sfr__cuda_enter(&scope, prober->cu, prober->context) == CUDA_SUCCESS) {
		free_tombstones(prober);
		sfr__cuda_leave(&scope);
	}
	give_prober(prober);
}

/* Makes memory and events for `nr` storages, unless the probe has them. The context must be
 * current, and no copy of the probe may be in flight. Returns the driver's error;
 * CUDA_ERROR_OUT_OF_MEMORY also if the memory cannot be pinned. */
static CUresult allocate_probe(struct sfr_probe *probe, uint32_t nr)
{
	const struct sfr__cuda *cu = probe->prober->cu;
	CUresult rc = CUDA_SUCCESS;

	if (!probe->ready)
		rc = cu->event_new(&probe->ready, CU_EVENT_DISABLE_TIMING);
	if (rc == CUDA_SUCCESS && !probe->done)
		rc = cu->event_new(&probe->done, CU_EVENT_DISABLE_TIMING);
	if (rc != CUDA_SUCCESS || nr <= probe->room)
		return rc;
	sfr__cuda_store_free(cu, &probe->store);
	sfr_sys.free(probe->rows);
	probe->room = 0;
	probe->rows = sfr_sys.malloc(nr * sizeof(*probe->rows));
	if (!probe->rows ||
	    sfr__cuda_store_new(cu, (size_t)nr * 2 * LINES * LINE, &probe->store) < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	/* Queueing a copy to pageable memory returns only when the copy has run, so the host would
	 * wait for the device. */
	if (!probe->store.pinned)
		return CUDA_ERROR_OUT_OF_MEMORY;
	probe->room = nr;
	return CUDA_SUCCESS;
}

/* Returns the host address to which the lines of storage `i` are copied, in the first round of
 * copies or, with `again`, in the second. */
static char *lines_of(const struct sfr_probe *probe, uint32_t i, bool again)
{
	const size_t first = again ? probe->room : 0;

	return (char *)probe->store.mem + (first + i) * LINES * LINE;
}

/* Sets up the copies of the first, middle and last line of each storage that is long enough. A copy
 * takes a storage's three lines as rows at equal distances. Returns the number of copies. */
static uint32_t set_up_rows(struct sfr_probe *probe, const struct sfr_probe_range *ranges,
			    uint32_t nr, bool again)
{
	uint32_t nr_rows = 0;

	for (uint32_t i = 0; i < nr; i++) {
		if (ranges[i].nbytes < LINES * LINE)
			continue;
		probe->rows[nr_rows++] = (struct sfr__cuda_rows){
			.dst = lines_of(probe, i, again),
			.src = ranges[i].addr,
			.width = LINE,
			.nr = LINES,
			.pitch = (ranges[i].nbytes - LINE) / (LINES - 1),
		};
	}
	return nr_rows;
}

/* Queues the copies in one call, or one by one if the driver has no such call or refuses it. */
static CUresult queue_rows(struct prober *prober, const struct sfr__cuda_rows *rows, uint32_t nr)
{
	CUresult rc = sfr__cuda_rows_queue(prober->cu, prober->stream, rows, nr, LINE, true);

	if (rc == CUDA_ERROR_NOT_SUPPORTED || rc == CUDA_ERROR_INVALID_VALUE)
		rc = sfr__cuda_rows_queue(prober->cu, prober->stream, rows, nr, LINE, false);
	return rc;
}

/* Makes the prober's stream wait for the caller's stream, queues the copies on the prober's stream,
 * and makes the caller's stream wait for the copies. */
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

/* Queues one round of copies. The thread has taken the prober, and its context is current. Returns
 * as sfr_probe_copy does; after an error of the driver the prober is closed. */
static int probe_once(struct sfr_probe *probe, CUstream stream,
		      const struct sfr_probe_range *ranges, uint32_t nr, bool again)
{
	struct prober *prober = probe->prober;
	CUresult rc = CUDA_SUCCESS;
	uint32_t nr_rows;

	if (sfr__cuda_is_capturing(prober->cu, stream))
		return SFR_ECAPTURING;
	free_tombstones(prober);
	if (!again && !query_probe(probe))
		return SFR_EBUSY;
	if (!again)
		rc = allocate_probe(probe, nr);
	if (rc == CUDA_SUCCESS) {
		probe->nr = nr;
		nr_rows = set_up_rows(probe, ranges, nr, again);
		if (nr_rows > 0)
			rc = queue_copies(probe, stream, nr_rows);
	}
	if (rc == CUDA_SUCCESS)
		return 0;
	close_prober(prober, "a probe of the device", rc);
	return -EIO;
}

int sfr_probe_copy(struct sfr_probe *probe, uint64_t stream, const struct sfr_probe_range *ranges,
		   uint32_t nr, int again)
{
	struct prober *prober = probe->prober;
	struct sfr__cuda_scope scope;
	CUresult rc;
	int ret;

	if (prober->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (nr == 0 || (again && nr != probe->nr))
		return -EINVAL;
	if (!take_prober(prober))
		return is_closed(prober) ? -EIO : SFR_EBUSY;
	rc = sfr__cuda_enter(&scope, prober->cu, prober->context);
	if (rc == CUDA_SUCCESS) {
		ret = probe_once(probe, (CUstream)(uintptr_t)stream, ranges, nr, again != 0);
		sfr__cuda_leave(&scope);
	} else {
		close_prober(prober, "cuCtxPushCurrent", rc);
		ret = -EIO;
	}
	give_prober(prober);
	return ret;
}

int sfr_probe_done(struct sfr_probe *probe)
{
	struct sfr__cuda_scope scope;
	bool done;

	if (probe->prober->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (is_closed(probe->prober) ||
	    sfr__cuda_enter(&scope, probe->prober->cu, probe->prober->context) != CUDA_SUCCESS)
		return -EIO;
	done = query_probe(probe);
	sfr__cuda_leave(&scope);
	return is_closed(probe->prober) ? -EIO : done;
}

int sfr_probe_same(const struct sfr_probe *probe, uint32_t i)
{
	return memcmp(lines_of(probe, i, false), lines_of(probe, i, true), LINES * LINE) == 0;
}
