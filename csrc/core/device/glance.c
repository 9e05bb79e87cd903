/* Probes of device memory: are a storage's bytes before a step the same as after the step before?
 *
 * The observer of an optimizer's storages has to compare their bytes, and the host cannot read
 * them. So three cache lines of each are copied to the host twice, and compared when both copies
 * have completed:
 *
 *     caller's stream   step | waits  forward, backward  | waits  step ...
 *     the eye's               \ lines /                   \ lines /   done?  same?
 *
 * The caller's stream waits for each copy, the host for none. Whether the copies have completed is
 * queried later, so a verdict lags as far as the device lags behind the host.
 *
 * There is one eye for each device and process, with a stream of its own. It stays as long as the
 * process. Only one thread at a time uses it: another one is told that it is busy, and probes after
 * its next step. So no thread waits for one that may have to wait for room on the stream. The eye's
 * lock is held during no call of the driver.
 *
 * A missing verdict only means that a copy is made in the call that could be deferred. So an eye
 * that meets an error is closed for good, and reports it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "sfr/glance.h"
#include "base/base.h"
#include "device/lane.h"

enum { LINES = 3, LINE = 64, EVENTS = 2 };

struct eye {
	struct eye *next;
	uint32_t device; /* constant, like the next four */
	uint64_t fork_generation;
	const struct sfr__cuda *cu;
	CUcontext context;
	CUstream stream;
	/* guarded by eyes.mu */
	bool busy, closed;
	/* tombstones: freed by their users, and perhaps still written to */
	struct sfr_glance *graves;
};

struct sfr_glance {
	struct sfr_glance *next; /* in the list of tombstones */
	struct eye *eye;
	CUevent ready, landed; /* E, and the event after the last lines */
	/* LINES lines of each storage, of the first probe and of the second */
	struct sfr__cuda_store store;
	struct sfr__cuda_rows *rows;
	uint32_t room, nr;
	bool in_flight;
};

static struct {
	struct sfr__mutex mu;
	struct eye *head; /* only grows */
} eyes = { .mu = SFR__MUTEX(SFR__LOCK_EYES) };

/* ---- eyes ------------------------------------------------------------------------ */

static bool is_closed(struct eye *eye)
{
	return sfr__under(&eyes.mu, eye->closed);
}

static void close_eye(struct eye *eye, const char *call, CUresult rc)
{
	char text[160];
	bool first;

	sfr__lock(&eyes.mu);
	first = !eye->closed;
	eye->closed = true;
	sfr__unlock(&eyes.mu);
	sfr__cuda_explain(eye->cu, eye->device, call, rc, text, sizeof(text));
	if (first && (int)rc != CUDA_ERROR_DEINITIALIZED)
		sfr__notice_text("%s: what is not known to change in steps only is copied in the "
				 "call from now on",
				 text);
}

/* Makes the stream. 0 or -errno. */
static int open_eye(struct eye *eye)
{
	char why[160];

	eye->cu = sfr__cuda_get(NULL, 0);
	if (!eye->cu)
		return -ENODEV;
	return sfr__cuda_open(eye->cu, eye->device, &eye->context, &eye->stream, why, sizeof(why));
}

static struct eye *find_locked(uint32_t device)
{
	for (struct eye *eye = eyes.head; eye; eye = eye->next)
		if (eye->device == device && eye->fork_generation == sfr_fork_generation())
			return eye;
	return NULL;
}

static int eye_get(uint32_t device, struct eye **out)
{
	struct eye *made;
	int rc;

	sfr__lock(&eyes.mu);
	*out = find_locked(device);
	sfr__unlock(&eyes.mu);
	if (*out)
		return 0;
	made = sfr_sys.calloc(1, sizeof(*made));
	if (!made)
		return -ENOMEM;
	made->device = device;
	made->fork_generation = sfr_fork_generation();
	rc = open_eye(made);
	if (rc < 0) {
		sfr_sys.free(made);
		return rc;
	}
	sfr__lock(&eyes.mu);
	*out = find_locked(device);
	if (!*out) {
		made->next = eyes.head;
		eyes.head = *out = made;
		made = NULL;
	}
	sfr__unlock(&eyes.mu);
	if (made) { /* another thread was first; this stream has no work */
		(void)made->cu->stream_free(made->stream);
		sfr__cuda_release(made->cu, device);
		sfr_sys.free(made);
	}
	return 0;
}

/* Takes the eye for this thread. False if another thread uses it, or it is closed. */
static bool take(struct eye *eye)
{
	bool free;

	sfr__lock(&eyes.mu);
	free = !eye->busy && !eye->closed;
	if (free)
		eye->busy = true;
	sfr__unlock(&eyes.mu);
	return free;
}

static void give(struct eye *eye)
{
	sfr__lock(&eyes.mu);
	eye->busy = false;
	sfr__unlock(&eyes.mu);
}

/* ---- probes ------------------------------------------------------------------------ */

/* Frees a probe. Needs the eye's context. */
static void destroy(struct sfr_glance *look)
{
	const struct sfr__cuda *cu = look->eye->cu;

	/* Nothing can be done about a failure. */
	if (look->ready)
		(void)cu->event_free(look->ready);
	if (look->landed)
		(void)cu->event_free(look->landed);
	sfr__cuda_store_free(cu, &look->store);
	sfr_sys.free(look->rows);
	sfr_sys.free(look);
}

/* Whether its copies have completed. Needs the context. */
static bool has_landed(struct sfr_glance *look)
{
	CUresult rc = look->in_flight ? look->eye->cu->event_query(look->landed) : CUDA_SUCCESS;

	if (rc == CUDA_SUCCESS)
		look->in_flight = false;
	else if (rc != CUDA_ERROR_NOT_READY)
		close_eye(look->eye, "cuEventQuery", rc);
	return rc == CUDA_SUCCESS;
}

static void push_grave(struct eye *eye, struct sfr_glance *look)
{
	sfr__lock(&eyes.mu);
	look->next = eye->graves;
	eye->graves = look;
	sfr__unlock(&eyes.mu);
}

/* Frees the tombstones whose copies have completed. Needs the eye and its context. */
static void bury(struct eye *eye)
{
	struct sfr_glance *look, *next;

	sfr__lock(&eyes.mu);
	look = eye->graves;
	eye->graves = NULL;
	sfr__unlock(&eyes.mu);
	for (; look; look = next) {
		next = look->next;
		if (has_landed(look))
			destroy(look);
		else
			push_grave(eye, look);
	}
}

int sfr_glance_new(uint32_t device, struct sfr_glance **out)
{
	struct sfr_glance *look = sfr_sys.calloc(1, sizeof(*look));
	int rc;

	*out = NULL;
	if (!look)
		return -ENOMEM;
	rc = eye_get(device, &look->eye);
	if (rc < 0)
		sfr_sys.free(look);
	else
		*out = look;
	return rc;
}

void sfr_glance_free(struct sfr_glance *look)
{
	struct sfr__cuda_scope scope;
	struct eye *eye;

	if (!look || look->eye->fork_generation != sfr_fork_generation())
		return;
	eye = look->eye;
	push_grave(eye, look);
	/* Otherwise the next probe frees it. With a closed eye the memory stays for as long as the
	 * process, because nobody knows whether a copy still runs. */
	if (!take(eye))
		return;
	if (sfr__cuda_enter(&scope, eye->cu, eye->context) == CUDA_SUCCESS) {
		bury(eye);
		sfr__cuda_leave(&scope);
	}
	give(eye);
}

/* Makes memory and events for `nr` storages. Needs the context; nothing may be in flight. */
static CUresult make_room(struct sfr_glance *look, uint32_t nr)
{
	const struct sfr__cuda *cu = look->eye->cu;
	CUresult rc = CUDA_SUCCESS;

	if (!look->ready)
		rc = cu->event_new(&look->ready, CU_EVENT_DISABLE_TIMING);
	if (rc == CUDA_SUCCESS && !look->landed)
		rc = cu->event_new(&look->landed, CU_EVENT_DISABLE_TIMING);
	if (rc != CUDA_SUCCESS || nr <= look->room)
		return rc;
	sfr__cuda_store_free(cu, &look->store);
	sfr_sys.free(look->rows);
	look->room = 0;
	look->rows = sfr_sys.malloc(nr * sizeof(*look->rows));
	if (!look->rows || sfr__cuda_store_new(cu, (size_t)nr * 2 * LINES * LINE, &look->store) < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	/* A copy to pageable memory returns only when it has run, which would wait for the
	 * device. */
	if (!look->store.pinned)
		return CUDA_ERROR_OUT_OF_MEMORY;
	look->room = nr;
	return CUDA_SUCCESS;
}

static char *lines_of(const struct sfr_glance *look, uint32_t i, bool again)
{
	return (char *)look->store.mem + ((size_t)again * look->room + i) * LINES * LINE;
}

/* Sets up the copies of start, middle and end of each wanted storage. Returns their number. */
static uint32_t place(struct sfr_glance *look, const struct sfr_glance_at *at, uint32_t nr,
		      bool again)
{
	uint32_t nr_rows = 0;

	for (uint32_t i = 0; i < nr; i++) {
		if (at[i].nbytes < LINES * LINE)
			continue;
		look->rows[nr_rows++] = (struct sfr__cuda_rows){
			.dst = lines_of(look, i, again),
			.src = at[i].addr,
			.width = LINE,
			.nr = LINES,
			.pitch = (at[i].nbytes - LINE) / (LINES - 1),
		};
	}
	return nr_rows;
}

static CUresult queue_rows(struct eye *eye, const struct sfr__cuda_rows *rows, uint32_t nr)
{
	CUresult rc = sfr__cuda_rows_queue(eye->cu, eye->stream, rows, nr, LINE, true);

	if (rc == CUDA_ERROR_NOT_SUPPORTED || rc == CUDA_ERROR_INVALID_VALUE)
		rc = sfr__cuda_rows_queue(eye->cu, eye->stream, rows, nr, LINE, false);
	return rc;
}

/* Records E on the caller's stream, queues the lines on the eye's, and makes the caller's stream
 * wait for them. */
static CUresult queue(struct sfr_glance *look, CUstream stream, uint32_t nr_rows)
{
	struct eye *eye = look->eye;
	CUresult rc = eye->cu->event_record(look->ready, stream);

	if (rc == CUDA_SUCCESS)
		rc = eye->cu->stream_wait(eye->stream, look->ready, 0);
	if (rc == CUDA_SUCCESS) {
		look->in_flight = true;
		rc = queue_rows(eye, look->rows, nr_rows);
	}
	if (rc == CUDA_SUCCESS)
		rc = eye->cu->event_record(look->landed, eye->stream);
	if (rc == CUDA_SUCCESS)
		rc = eye->cu->stream_wait(stream, look->landed, 0);
	return rc;
}

static int look_once(struct sfr_glance *look, CUstream stream, const struct sfr_glance_at *at,
		     uint32_t nr, bool again)
{
	struct eye *eye = look->eye;
	CUresult rc = CUDA_SUCCESS;
	uint32_t nr_rows;

	if (sfr__cuda_is_capturing(eye->cu, stream))
		return SFR_ECAPTURING;
	bury(eye);
	if (!again && !has_landed(look))
		return SFR_EBUSY;
	if (!again)
		rc = make_room(look, nr);
	if (rc == CUDA_SUCCESS) {
		look->nr = nr;
		nr_rows = place(look, at, nr, again);
		if (nr_rows > 0)
			rc = queue(look, stream, nr_rows);
	}
	if (rc == CUDA_SUCCESS)
		return 0;
	close_eye(eye, "a look at the device", rc);
	return -EIO;
}

int sfr_glance_take(struct sfr_glance *look, uint64_t stream, const struct sfr_glance_at *at,
		    uint32_t nr, int again)
{
	struct eye *eye = look->eye;
	struct sfr__cuda_scope scope;
	CUresult rc;
	int ret;

	if (eye->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (nr == 0 || (again && nr != look->nr))
		return -EINVAL;
	if (!take(eye))
		return is_closed(eye) ? -EIO : SFR_EBUSY;
	rc = sfr__cuda_enter(&scope, eye->cu, eye->context);
	if (rc == CUDA_SUCCESS) {
		ret = look_once(look, (CUstream)(uintptr_t)stream, at, nr, again != 0);
		sfr__cuda_leave(&scope);
	} else {
		close_eye(eye, "cuCtxPushCurrent", rc);
		ret = -EIO;
	}
	give(eye);
	return ret;
}

int sfr_glance_landed(struct sfr_glance *look)
{
	struct sfr__cuda_scope scope;
	bool landed;

	if (look->eye->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (is_closed(look->eye) ||
	    sfr__cuda_enter(&scope, look->eye->cu, look->eye->context) != CUDA_SUCCESS)
		return -EIO;
	landed = has_landed(look);
	sfr__cuda_leave(&scope);
	return is_closed(look->eye) ? -EIO : landed;
}

int sfr_glance_same(const struct sfr_glance *look, uint32_t i)
{
	return memcmp(lines_of(look, i, false), lines_of(look, i, true), LINES * LINE) == 0;
}
