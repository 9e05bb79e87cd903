/* Recording: each thread has a ring of events that it writes and one other thread reads.
 *
 *     thread:  events[head % N] = e;  head + 1 (release)      reader:  head (acquire)
 *              a full ring (head - tail = N) drops e          events[tail % N];  tail + 1 (release)
 *
 * A ring is made at a thread's first event, and freed once the thread has ended and its events are
 * read. An event that is recorded after the end of a trace stays in the ring. The next trace skips
 * it, because it started before that trace.
 *
 * A mutex guards the registry, a list of rings. It may be taken under any other lock of the core;
 * no lock is taken under it. */
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "trace/ring.h"

#define SMALL_COPY (64u << 10) /* bytes; smaller copies of storages are not recorded */

_Atomic uint32_t sfr__trace_on;

static struct {
	struct sfr__mutex mu;
	struct sfr__ring *rings;
	struct sfr__ring *of_parent; /* in a forked child: the parent's rings, unused */
	bool reading; /* a trace is being written; its reader frees the rings of ended threads */
} registry = { .mu = SFR__MUTEX(SFR__LOCK_REGISTRY) };
static _Atomic uint64_t lost; /* events for which there was no ring */

static _Thread_local struct sfr__ring *thread_ring; /* of the calling thread, or NULL */
/* the key of each thread's ring; release_ring_at_thread_end is its destructor */
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool have_key;

/* ---- a thread's ring ---- */

static void unlink_ring_locked(struct sfr__ring *ring)
{
	struct sfr__ring **link = &registry.rings;

	while (*link && *link != ring)
		link = &(*link)->next;
	if (*link)
		*link = ring->next;
}

/* Called when a thread ends. Frees its ring or, if a trace is being written, leaves that to the
 * reader. */
static void release_ring_at_thread_end(void *arg)
{
	struct sfr__ring *ring = arg;
	bool free_now;

	thread_ring = NULL;
	sfr__lock(&registry.mu);
	free_now = !registry.reading;
	if (free_now)
		unlink_ring_locked(ring);
	else
		atomic_store_explicit(&ring->dead, true, memory_order_release);
	sfr__unlock(&registry.mu);
	if (free_now)
		sfr_sys.free(ring);
}

static void make_key(void)
{
	have_key = pthread_key_create(&key, release_ring_at_thread_end) == 0;
}

/* Returns the calling thread's ring, which is made at the first call; NULL without memory. */
static struct sfr__ring *get_or_make_ring(void)
{
	struct sfr__ring *ring = thread_ring;

	if (ring)
		return ring;
	(void)pthread_once(&key_once, make_key); /* cannot fail */
	ring = have_key ? sfr_sys.calloc(1, sizeof(*ring)) : NULL;
	if (ring && pthread_setspecific(key, ring) != 0) {
		sfr_sys.free(ring);
		ring = NULL;
	}
	if (!ring)
		return NULL;
	ring->tid = (uint64_t)syscall(SYS_gettid);
	/* on failure the name stays empty */
	(void)pthread_getname_np(pthread_self(), ring->name, sizeof(ring->name));
	sfr__lock(&registry.mu);
	ring->next = registry.rings;
	registry.rings = ring;
	sfr__unlock(&registry.mu);
	thread_ring = ring;
	return ring;
}

/* Appends an event. Counts it as lost if the ring is full or NULL. */
static void put_event(struct sfr__ring *ring, const struct sfr__trace_event *event)
{
	uint64_t head, tail;

	if (!ring) {
		atomic_fetch_add_explicit(&lost, 1, memory_order_relaxed);
		return;
	}
	head = atomic_load_explicit(&ring->head, memory_order_relaxed);
	tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
	if (head - tail >= SFR__RING_EVENTS) {
		atomic_fetch_add_explicit(&ring->dropped, 1, memory_order_relaxed);
		return;
	}
	ring->events[head % SFR__RING_EVENTS] = *event;
	atomic_store_explicit(&ring->head, head + 1, memory_order_release);
}

static bool is_tracing(void)
{
	return atomic_load_explicit(&sfr__trace_on, memory_order_relaxed) != 0;
}

/* ---- spans ---- */

struct sfr__span sfr__span_begin_recording(enum sfr_trace_kind kind, uint64_t save, uint64_t number)
{
	struct sfr__span span = { .save = save, .number = number, .kind = kind };
	struct sfr__ring *ring;

	if (kind == SFR_TRACE_STORAGE && number < SMALL_COPY)
		return span;
	ring = get_or_make_ring();
	if (ring) {
		span.outer_save = ring->save; /* sfr__span_record restores it */
		if (save)
			ring->save = save; /* the spans within this one belong to the same save */
		else
			span.save = ring->save; /* the enclosing span's save */
	}
	span.start_ns = sfr__now_ns(); /* last, so that making the ring is not included */
	return span;
}

void sfr__span_record(struct sfr__span *span)
{
	const struct sfr__trace_event event = { .start_ns = span->start_ns,
						.end_ns = sfr__now_ns(),
						.save = span->save,
						.number = span->number,
						.kind = (uint16_t)span->kind };
	struct sfr__ring *ring = get_or_make_ring();

	if (ring)
		ring->save = span->outer_save; /* the enclosing span is the innermost again */
	put_event(ring, &event);
}

uint64_t sfr_trace_get_start_ns(void)
{
	return is_tracing() ? sfr__now_ns() : 0;
}

void sfr_trace_record_span(enum sfr_trace_kind kind, uint64_t start_ns, uint64_t save,
			   uint64_t number)
{
	const struct sfr__trace_event event = { .start_ns = start_ns,
						.end_ns = start_ns ? sfr__now_ns() : 0,
						.save = save,
						.number = number,
						.kind = (uint16_t)kind };

	if (start_ns && is_tracing())
		put_event(get_or_make_ring(), &event);
}

void sfr__trace_save(uint64_t save, uint64_t start_ns, uint64_t end_ns, uint64_t nbytes,
		     enum sfr_state state, const char *name)
{
	struct sfr__trace_event event = { .start_ns = start_ns,
					  .end_ns = end_ns,
					  .save = save,
					  .number = nbytes,
					  .kind = SFR_TRACE_SAVE,
					  .state = (uint16_t)state };

	if (!is_tracing())
		return;
	strncpy(event.name, name ? name : "", sizeof(event.name) - 1);
	put_event(get_or_make_ring(), &event);
}

/* ---- steps ---- */

/* Returns the index of the innermost open step of an optimizer in ring->steps, or -1. */
static int find_step(const struct sfr__ring *ring, uint64_t optimizer)
{
	for (uint32_t i = ring->nr_steps; i > 0; i--)
		if (ring->steps[i - 1].optimizer == optimizer)
			return (int)i - 1;
	return -1;
}

static void begin_step(struct sfr__ring *ring, uint64_t optimizer)
{
	const int index = find_step(ring, optimizer);

	if (index >= 0)
		ring->nr_steps = (uint32_t)index; /* drop the open step: it raised an exception */
	if (ring->nr_steps == SFR__MAX_STEPS)
		return; /* nested too deep: not recorded */
	ring->steps[ring->nr_steps].optimizer = optimizer;
	ring->steps[ring->nr_steps].start_ns = sfr__now_ns();
	ring->nr_steps++;
}

static void end_step(struct sfr__ring *ring, uint64_t optimizer)
{
	struct sfr__trace_event event = { .end_ns = sfr__now_ns() };
	const int index = find_step(ring, optimizer);

	if (index < 0)
		return; /* the step began before the trace */
	ring->nr_steps = (uint32_t)index;
	if (index == 0) { /* a training step: from the end of the previous step to this end */
		event.kind = SFR_TRACE_STEP;
		event.start_ns = ring->last_step_ns ? ring->last_step_ns : ring->steps[0].start_ns;
		event.number = ++ring->step_number;
		put_event(ring, &event);
		ring->last_step_ns = event.end_ns;
	}
	event.kind = SFR_TRACE_OPTIMIZER;
	event.start_ns = ring->steps[index].start_ns;
	put_event(ring, &event);
}

void sfr_trace_step(uint64_t optimizer, bool ended)
{
	uint32_t trace_number = atomic_load_explicit(&sfr__trace_on, memory_order_relaxed);
	struct sfr__ring *ring;

	if (!trace_number)
		return;
	ring = get_or_make_ring();
	if (!ring) {
		put_event(NULL, NULL); /* without a ring, only counts a lost event */
		return;
	}
	if (ring->steps_trace != trace_number) { /* the first step in this trace */
		ring->steps_trace = trace_number;
		ring->nr_steps = 0;
		ring->step_number = ring->last_step_ns = 0;
	}
	if (ended)
		end_step(ring, optimizer);
	else
		begin_step(ring, optimizer);
}

/* ---- reading ---- */

void sfr__rings_begin_trace(uint32_t trace_number)
{
	sfr__lock(&registry.mu);
	registry.reading = true;
	for (struct sfr__ring *ring = registry.rings; ring; ring = ring->next) {
		uint64_t head = atomic_load_explicit(&ring->head, memory_order_acquire);

		atomic_store_explicit(&ring->tail, head, memory_order_release);
		atomic_store_explicit(&ring->dropped, 0, memory_order_relaxed);
		ring->dropped_seen = 0;
	}
	atomic_store_explicit(&lost, 0, memory_order_relaxed);
	sfr__unlock(&registry.mu);
	atomic_store_explicit(&sfr__trace_on, trace_number, memory_order_release);
}

void sfr__rings_each(void (*read)(struct sfr__ring *ring, void *arg), void *arg)
{
	struct sfr__ring *ring;

	sfr__lock(&registry.mu);
	ring = registry.rings;
	sfr__unlock(&registry.mu);
	/* `next` does not change: new rings are added in front, and only the reader removes
	 * rings. */
	for (; ring; ring = ring->next)
		read(ring, arg);
}

/* Returns whether the reader frees a ring in this sweep. A ring stays while its thread runs and,
 * before the last sweep, while events or counts of dropped events are unread. */
static bool can_free_ring(struct sfr__ring *ring, bool last)
{
	if (!atomic_load_explicit(&ring->dead, memory_order_acquire))
		return false;
	if (last)
		return true;
	return !sfr__ring_peek(ring) && ring->dropped_seen == atomic_load(&ring->dropped);
}

void sfr__rings_free_dead(bool last)
{
	struct sfr__ring *removed = NULL;

	sfr__lock(&registry.mu);
	registry.reading = !last;
	for (struct sfr__ring **link = &registry.rings; *link;) {
		struct sfr__ring *ring = *link;

		if (!can_free_ring(ring, last)) {
			link = &ring->next;
			continue;
		}
		*link = ring->next;
		ring->next = removed;
		removed = ring;
	}
	sfr__unlock(&registry.mu);
	while (removed) {
		struct sfr__ring *next = removed->next;

		sfr_sys.free(removed);
		removed = next;
	}
}

uint64_t sfr__rings_count_lost(void)
{
	return atomic_load_explicit(&lost, memory_order_relaxed);
}

const struct sfr__trace_event *sfr__ring_peek(struct sfr__ring *ring)
{
	uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);

	if (tail == atomic_load_explicit(&ring->head, memory_order_acquire))
		return NULL;
	return &ring->events[tail % SFR__RING_EVENTS];
}

void sfr__ring_pop(struct sfr__ring *ring)
{
	uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);

	atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
}

/* Runs in a forked child. */
static void reset_rings_in_child(void)
{
	/* Not freed, because a thread that does not exist in the child may have held the
	 * allocator's lock. Kept reachable for leak checkers. */
	registry.of_parent = registry.rings;
	atomic_store(&sfr__trace_on, 0);
	thread_ring = NULL;
	if (have_key)
		(void)pthread_setspecific(key, NULL); /* cannot fail: the key has a value */
	registry.rings = NULL;
	registry.reading = false;
	sfr__mutex_init(&registry.mu, SFR__LOCK_REGISTRY);
}
SFR__AT_FORK(reset_rings_in_child)
