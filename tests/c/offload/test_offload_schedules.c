/* Random schedules of groups that leave a device and come back, over the fake driver.
 *
 * The device has a few slots of memory and one stream that computes. Each turn copies a group's
 * bytes into a slot, mostly before the work of the previous turn is queued. The stream reads the
 * bytes, overwrites them, and copies the new ones into pool memory. The host waits only for
 * memory of the pool, which has little more than the groups need. Tickets are released while
 * copies may still read from their memory. Every group must be read, and must end, as it was
 * last written. A seed chooses delays, sizes, which side runs first, and the kind of each turn.
 *
 *     STILLFRAME_SCHEDULES=10000        the number of schedules, 150 by default
 *     STILLFRAME_FIRST_SCHEDULE=4711    the first seed, to repeat one schedule */
#include <time.h>

#include "cuda/fake.h"
#include "offload/offload.h"
#include "snapshot/snapshot.h"

enum { GROUPS = 5, SLOTS = 3, PARTS = 3, PART = 9000, TURNS = 10, BLOCKS_EACH = 4, WORK = 64 };

/* The device's memory for one group, and what still reads from it. */
static struct slot {
	unsigned char bytes[PARTS][PART] __attribute__((aligned(64)));
	struct sfr_snapshot *leaving; /* the snapshot that its memory is being copied to */
	struct sfr_onload *coming;
	int of; /* the group in it; -1: none */
} slots[SLOTS];

/* A group: its bytes are in the pool; each part is full of one value. */
static struct group {
	struct sfr_snapshot *ticket;
	uint64_t lens[PARTS];
	unsigned char value;
} groups[GROUPS];

/* Work for the computing stream. */
static struct work {
	struct slot *slot;
	const struct group *group;
	unsigned char seen, next; /* the value that it must read, and the value that it writes */
} works[WORK];
static unsigned nr_works;
static atomic_uint nr_torn;
static void *stream;

/* ---- what the device does ---------------------------------------------------------- */

static void compute(void *arg)
{
	const struct work *work = arg;

	for (unsigned i = 0; i < PARTS; i++) {
		const uint64_t len = work->group->lens[i];

		for (uint64_t k = 0; k < len; k++)
			if (work->slot->bytes[i][k] != (unsigned char)(work->seen + i)) {
				atomic_fetch_add(&nr_torn, 1);
				break;
			}
		memset(work->slot->bytes[i], work->next + (int)i, len);
	}
}

/* Overwrites memory that was freed, as its next user does. */
static void scribble(void *arg)
{
	struct slot *slot = arg;

	memset(slot->bytes, 0xee, sizeof(slot->bytes));
}

/* ---- out and in ---------------------------------------------------------------------- */

static struct sfr_device_stream main_stream(void)
{
	return (struct sfr_device_stream){ .handle = (uint64_t)(uintptr_t)stream, .device = 0 };
}

static void take_notices(void)
{
	struct sfr_notice notice;

	while (sfr_notice_wait(&notice, 0) == 0)
		if (notice.snapshot)
			sfr_snapshot_put(notice.snapshot);
}

/* Leases memory of the pool for a group, with bytes of the host or of a slot. */
static struct sfr_snapshot *leave(struct sfr_engine *engine, const struct group *group,
				  const struct slot *slot, uint32_t device)
{
	const struct sfr_device_stream streams[] = { main_stream() };
	struct sfr_source sources[PARTS];
	struct sfr_snapshot *s = NULL;

	for (unsigned i = 0; i < PARTS; i++)
		sources[i] = (struct sfr_source){
			.addr = (uint64_t)(uintptr_t)slot->bytes[i] |
				(device ? FAKE_CUDA_DEVICE : 0),
			.nbytes = group->lens[i],
			.device = device,
		};
	CHECK_EQ(sfr_snapshot_new(engine, sources, PARTS, SFR_SNAPSHOT_LEAVES, &s), 0);
	CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
	if (device)
		CHECK_EQ(sfr_snapshot_set_streams(s, streams, 1), 0);
	CHECK_EQ(sfr_snapshot_start(s), 0);
	return s;
}

/* Lets the stream's later work write to the slot, whose memory is being copied out. */
static void order_out(struct slot *slot)
{
	const struct sfr_device_stream streams[] = { main_stream() };

	if (!slot->leaving)
		return;
	CHECK_EQ(sfr_snapshot_gate(slot->leaving, streams, 1, SFR_FOREVER), 0);
	sfr_snapshot_put(slot->leaving);
	slot->leaving = NULL;
}

static void onload_group(struct sfr_engine *engine, int g, struct slot *slot)
{
	const struct group *group = &groups[g];
	struct sfr_onload_copy copies[PARTS];
	char *base;
	uint64_t len;

	sfr_onload_wait_and_free(slot->coming);
	slot->coming = NULL;
	order_out(slot);
	fake.fake_cuda_launch(stream, scribble, slot);
	sfr_snapshot_memory(group->ticket, &base, &len);
	for (unsigned i = 0; i < PARTS; i++)
		copies[i] = (struct sfr_onload_copy){
			.src = (uint64_t)(uintptr_t)base + sfr_snapshot_offset(group->ticket, i),
			.dst = (uint64_t)(uintptr_t)slot->bytes[i] | FAKE_CUDA_DEVICE,
			.nbytes = group->lens[i],
		};
	CHECK_EQ(sfr_onload_start(engine, 0, main_stream().handle, copies, PARTS, group->ticket,
				  &slot->coming),
		 0);
	slot->of = g;
}

/* Computes with a group that is in a slot or on its way there, and copies it out. */
static void use_group(struct sfr_engine *engine, struct slot *slot)
{
	struct group *group = &groups[slot->of];
	struct work *work = &works[nr_works++];
	struct sfr_snapshot *old = group->ticket;

	*work = (struct work){ slot, group, group->value, (unsigned char)(1 + fake_rng(200)) };
	CHECK_EQ(sfr_onload_make_stream_wait(slot->coming, main_stream().handle), 0);
	fake.fake_cuda_launch(stream, compute, work);
	group->value = work->next;
	/* Released before new memory is leased, because the pool may have none to spare. */
	sfr_snapshot_remove_view(old);
	sfr_snapshot_put(old);
	group->ticket = leave(engine, group, slot, 1);
	sfr_snapshot_get(group->ticket);
	slot->leaving = group->ticket;
	slot->of = -1;
	take_notices();
}

/* ---- a schedule ------------------------------------------------------------------------ */

static struct slot *free_slot(void)
{
	unsigned first = fake_rng(SLOTS);

	for (unsigned i = 0; i < SLOTS; i++)
		if (slots[(first + i) % SLOTS].of < 0)
			return &slots[(first + i) % SLOTS];
	return NULL;
}

static struct slot *taken_slot(void)
{
	unsigned first = fake_rng(SLOTS);

	for (unsigned i = 0; i < SLOTS; i++)
		if (slots[(first + i) % SLOTS].of >= 0)
			return &slots[(first + i) % SLOTS];
	return NULL;
}

static bool is_on_device(int g)
{
	for (unsigned i = 0; i < SLOTS; i++)
		if (slots[i].of == g)
			return true;
	return false;
}

static void begin_schedule(uint64_t seed)
{
	fake__random = seed * 2654435761u + 1;
	fake.fake_cuda_delay(fake_rng(2) ? 1 + fake_rng(60000) : 0, seed);
	fake.fake_cuda_delay_one_in(1 + fake_rng(4));
	fake.fake_cuda_first((int)fake_rng(3));
	nr_works = 0;
	for (unsigned i = 0; i < SLOTS; i++)
		slots[i].of = -1;
}

static void check_groups(void)
{
	for (int g = 0; g < GROUPS; g++) {
		int64_t torn;
		char *base;
		uint64_t len;

		CHECK_EQ(sfr_snapshot_wait(groups[g].ticket, SFR_FOREVER, &torn), 0);
		sfr_snapshot_memory(groups[g].ticket, &base, &len);
		for (unsigned i = 0; i < PARTS; i++) {
			const char *at = base + sfr_snapshot_offset(groups[g].ticket, i);
			uint64_t k = 0;

			while (k < groups[g].lens[i] &&
			       (unsigned char)at[k] == (unsigned char)(groups[g].value + (int)i))
				k++;
			CHECK_EQ(k, groups[g].lens[i]);
		}
		sfr_snapshot_remove_view(groups[g].ticket);
		sfr_snapshot_put(groups[g].ticket);
	}
}

static void one_schedule(uint64_t seed)
{
	struct sfr_engine *engine;

	begin_schedule(seed);
	/* The pool has memory for one more group than there are, sometimes for two. */
	engine = fake_engine(BLOCKS_EACH * (GROUPS + 1 + fake_rng(2)), 1);
	for (int g = 0; g < GROUPS; g++) {
		static struct slot bytes;

		groups[g].value = (unsigned char)(1 + fake_rng(200));
		for (unsigned i = 0; i < PARTS; i++) {
			groups[g].lens[i] = 1 + fake_rng(PART - 1);
			memset(bytes.bytes[i], groups[g].value + (int)i, PART);
		}
		groups[g].ticket = leave(engine, &groups[g], &bytes, 0);
	}
	for (unsigned i = 0; i < TURNS; i++) {
		int g = (int)fake_rng(GROUPS);
		struct slot *slot = free_slot();

		if (slot && !is_on_device(g))
			onload_group(engine, g, slot);
		slot = taken_slot();
		if (slot && (fake_rng(2) || !free_slot()))
			use_group(engine, slot);
	}
	for (unsigned i = 0; i < SLOTS; i++) {
		if (slots[i].of >= 0)
			use_group(engine, &slots[i]);
		sfr_onload_wait_and_free(slots[i].coming);
		slots[i].coming = NULL;
		order_out(&slots[i]);
	}
	check_groups();
	fake.fake_cuda_drain(stream); /* it reads the work */
	for (unsigned i = 0; i < SLOTS; i++)
		fake.fake_cuda_freed(slots[i].bytes, sizeof(slots[i].bytes));
	CHECK_EQ(atomic_exchange(&nr_torn, 0), 0);
	saving_end(engine);
	take_notices();
	fake_check();
	fake_check_nothing_left();
}

TEST(random_schedules_give_consistent_copies)
{
	uint64_t first = check_number("STILLFRAME_FIRST_SCHEDULE", 1);
	uint64_t nr = check_number("STILLFRAME_SCHEDULES", 150);
	unsigned nr_failed = 0;

	stream = fake.fake_cuda_stream(0);
	for (uint64_t seed = first; seed - first < nr && nr_failed < 5; seed++) {
		int before = check__nr_failed;

		(void)alarm(100);
		fake.fake_cuda_reset();
		one_schedule(seed);
		if (check__nr_failed == before)
			continue;
		nr_failed++;
		(void)fprintf(stderr, "  STILLFRAME_FIRST_SCHEDULE=%llu repeats it\n",
			      (unsigned long long)seed);
	}
	(void)alarm(0);
	if (getenv("STILLFRAME_SCHEDULES"))
		(void)fprintf(stderr, "  %llu schedules, %u failed\n", (unsigned long long)nr,
			      nr_failed);
}

BEGIN
{
	return fake_load();
}
