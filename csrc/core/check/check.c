/* Decides whether a file is a complete checkpoint: checks the structure of the archive and, with
 * SFR_CHECK_BYTES, the CRC of every record.
 *
 * The walk. Records of a checkpoint must be in the file in the order of the directory, without
 * overlap. So the directory and the data are each read once, front to back, through a window: a
 * buffer that moves forward in the file. The check needs memory for two windows and 16 bytes a
 * record, whatever the numbers in the file claim.
 *
 *     the file    | header data desc | header data desc | gap | ... | directory | end records |
 *                           ^ body window                             ^ directory window
 *
 *     START --> RECORD --> BYTES --> RECORD ... --> SORT --> NAMES --> DONE
 *      | |        |          (only with SFR_CHECK_BYTES)                ^
 *      | +--------+--- foreign, truncated, no directory ----------------+
 *      |                                                                |
 *      +--> SUMS --- every record was read ----------------------------+
 *             +---- not readable in this way --> RECORD
 *
 *     START   start_check    the kind of file; its end records
 *     SUMS    check_sums     a long file's bytes and headers, read on threads (sums.c)
 *     RECORD  next_record    one directory record, its local header and descriptor (records.c)
 *     BYTES   record_bytes   one chunk of the record's data (records.c)
 *     SORT    continue_sorting_names       sorts the names by their hashes: a bounded number of
 *                                          moves
 *     NAMES   check_next_same_hash_names   compares a pair of names; at the end, looks for data.pkl
 *                                          and version
 *     DONE                   the result is final
 *
 * A step is a function that returns 0, SFR_EAGAIN or -errno, and sets c->state to the next step. If
 * bytes have not arrived yet (reader/arrivals.c), the step returns SFR_EAGAIN, leaves the check as
 * it was, and is tried again.
 *
 * Damage of the end records or of the directory's structure ends the check. After damage of one
 * record the walk continues, so that the user learns which tensors are lost.
 *
 * The records' headers are not read with SFR_CHECK_DIRECTORY, nor with SFR_CHECK_LATER if records
 * are long. Reading them would leave scattered pages in the page cache, and the kernel does no
 * readahead across them: a load after such a check took 1.5 times as long. */
#include <errno.h>
#include <stdio.h> /* snprintf */
#include <string.h>

#include "check/records.h"
#include "sfr/limits.h"
#include "base/base.h"

#define HEADER_CHUNK_BYTES (1u << 14) /* read at a time for headers, without SFR_CHECK_BYTES */
#define DIR_CHUNK_BYTES (1u << 16)    /* read at a time of the directory */
/* The average length from which on records are long: twice the kernel's initial readahead. */
#define LONG_RECORD_BYTES (1u << 16)
#define MOVES_PER_STEP 512u /* moves of the sort; they take a tenth of a millisecond */
/* The most pairs of different names with the same hash. Only a hostile file has such pairs. */
#define SAME_HASH_MAX 64u
/* Bytes of a window; enough for a local header or directory record at any offset in a page. */
#define WINDOW_BYTES (3u << 16)
_Static_assert(SFR__UNZIP_TAIL_MAX + SFR_PAGE <= WINDOW_BYTES, "the file's tail fits the window");
_Static_assert(SFR__UNZIP_CENTRAL_LEN + SFR__UNZIP_NAME_MAX + 2 * 0xffffu + SFR_PAGE <=
		       WINDOW_BYTES,
	       "a directory record fits the window");

/* ---- START ------------------------------------------------------------------- */

/* Returns whether a file begins like torch's legacy format: with a pickled number. */
static bool is_legacy(const unsigned char *head, size_t len)
{
	enum { PROTOCOL = 0x80, FRAME = 0x95 }; /* opcodes, see Python's module pickletools */
	enum { PROTOCOL_LEN = 2, FRAME_LEN = 9 };
	/* the number in protocols 0 and 1, and in later protocols */
	static const char magic_text[] = "L119547037146038801333356L\n.";
	static const unsigned char magic_binary[] = { 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9,
						      0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e };
	size_t at = PROTOCOL_LEN; /* offset of the number in later protocols */

	if (len >= sizeof(magic_text) - 1 && memcmp(head, magic_text, sizeof(magic_text) - 1) == 0)
		return true;
	if (len < PROTOCOL_LEN || head[0] != PROTOCOL)
		return false;
	if (len > at && head[at] == FRAME) /* from protocol 4 on */
		at += FRAME_LEN;
	return len >= at + sizeof(magic_binary) &&
	       memcmp(head + at, magic_binary, sizeof(magic_binary)) == 0;
}

/* Returns what is wrong with a file that begins like no format of torch. */
static const char *describe_foreign(const unsigned char *head, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (head[i] != 0)
			return "it is not a torch.save file";
	return "it begins with zeros, like a file whose bytes never reached the disk";
}

/* Returns whether the check reads on threads. A short file is checked sooner without them. */
static bool uses_threads(const struct sfr_check *c)
{
	return (c->flags & SFR_CHECK_BYTES) != 0 && c->result.nbytes >= sfr_limits.ahead_bytes;
}

static size_t smaller_of(uint64_t len, size_t max)
{
	return len < max ? (size_t)len : max;
}

/* Makes the windows through which directory and data are read. They are no longer than the file.
 * Returns 0 or -ENOMEM. */
static int make_windows(struct sfr_check *c)
{
	const bool reads_data = (c->flags & SFR_CHECK_BYTES) != 0;
	const uint64_t len = c->result.nbytes;
	const size_t chunk_bytes =
		reads_data ? (size_t)sfr_limits.check_chunk_bytes : HEADER_CHUNK_BYTES;
	const size_t body_bytes = chunk_bytes > WINDOW_BYTES ? chunk_bytes : WINDOW_BYTES;
	enum sfr__read_way way = SFR__WAY_CACHE;
	int rc;

	if (c->body_window.mem != NULL)
		return 0; /* the step START is tried again, and has made them */
	rc = sfr__window_init(&c->dir_window, c->fd, c->base, SFR__WAY_CACHE,
			      smaller_of(len, WINDOW_BYTES), DIR_CHUNK_BYTES);
	if (rc != 0)
		return rc;
	/* a short file is read through the page cache, even with SFR_CHECK_DIRECT */
	if (uses_threads(c) && (c->flags & SFR_CHECK_DIRECT) != 0)
		way = SFR__WAY_DISK;
	return sfr__window_init(&c->body_window, c->fd, c->base, way, smaller_of(len, body_bytes),
				chunk_bytes);
}

/* Finds the end of the archive. Sets *wrong to damage of the end records, or to NULL. Returns 0,
 * SFR_EAGAIN or -errno. Afterwards c->state is DONE if the file was changed meanwhile. */
static int find_archive_end(struct sfr_check *c, const char **wrong)
{
	/* first assume that nothing follows the end record, then read as far back as torch does */
	static const uint32_t tail_lens[] = { SFR__UNZIP_TAIL_LEN, SFR__UNZIP_TAIL_MAX };
	struct sfr_check_result *r = &c->result;
	const unsigned char *bytes;
	size_t len = 0;

	*wrong = NULL;
	for (size_t i = 0; i < 2; i++) {
		int rc;

		len = smaller_of(r->nbytes, tail_lens[i]);
		rc = sfr__window_get(&c->dir_window, r->nbytes - len, len, r->nbytes, &bytes, NULL);
		if (rc != 0)
			return sfr__check_handle_read_error(c, rc);
		if (sfr__unzip_trailing_bytes(bytes, len) == 0)
			break; /* the end record is the last in the file */
	}
	*wrong = sfr__unzip_end(bytes, len, r->nbytes, &c->end);
	r->nr_trailing = *wrong == NULL ? r->nbytes - c->end.len : 0;
	return 0;
}

static int start_check(struct sfr_check *c)
{
	struct sfr_check_result *r = &c->result;
	const unsigned char *bytes;
	const char *wrong;
	struct stat st;
	bool records_are_long;
	size_t len;
	int rc;

	if (sfr_sys.fstat(c->fd, &st) != 0)
		return sfr__check_handle_read_error(c, -errno);
	if (S_ISDIR(st.st_mode))
		return sfr__check_handle_read_error(c, -EISDIR);
	if (!S_ISREG(st.st_mode))
		return sfr__check_end_with_damage(c, "it is not a regular file");
	if (r->nbytes == SFR_CHECK_WHOLE)
		r->nbytes = (uint64_t)st.st_size;
	if (r->nbytes == 0)
		return sfr__check_end_with_damage(c, "it is empty");
	rc = make_windows(c);
	if (rc != 0)
		return rc;

	len = smaller_of(r->nbytes, 64); /* enough bytes to recognise the format */
	rc = sfr__window_get(&c->body_window, 0, len, r->nbytes, &bytes, NULL);
	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	if (is_legacy(bytes, len)) {
		r->format = SFR_FORMAT_LEGACY;
		r->ok = true;
		c->body_pos = r->nbytes;
		c->state = SFR__CHECK_DONE;
		return 0;
	}
	/* torch.load recognises an archive by these four bytes, too; a file may be cut off here */
	if (memcmp(bytes, "PK\3\4", len < 4 ? len : 4) != 0)
		return sfr__check_end_with_damage(c, describe_foreign(bytes, len));
	r->format = SFR_FORMAT_ARCHIVE;

	rc = find_archive_end(c, &wrong);
	if (rc != 0 || c->state == SFR__CHECK_DONE)
		return rc;
	if (wrong != NULL)
		return sfr__check_end_with_damage(c, wrong);
	r->nr_records = c->end.nr_records;
	/* reading the headers of long records would slow the load that follows (see the head) */
	records_are_long = c->end.dir_off / LONG_RECORD_BYTES >= c->end.nr_records;
	if ((c->flags & SFR_CHECK_LATER) != 0 && records_are_long)
		c->flags |= SFR_CHECK_DIRECTORY;
	r->headers = (c->flags & SFR_CHECK_DIRECTORY) == 0;
	c->dir_pos = c->end.dir_off;
	c->state = uses_threads(c) ? SFR__CHECK_SUMS : SFR__CHECK_RECORD;
	return 0;
}

/* ---- SUMS ------------------------------------------------------------------- */

/* Frees the reader and the check of the directory, if there are any. */
static void free_reader_and_dir_check(struct sfr_check *c)
{
	sfr__reader_free(c->reader);
	sfr_check_free(c->dir_check);
	c->reader = NULL;
	c->dir_check = NULL;
}

/* Checks the directory, and starts the reader if there is no damage. Returns 0, SFR_EAGAIN, or an
 * error; after an error the walk checks the file. */
static int check_dir_and_start_reader(struct sfr_check *c)
{
	int rc = 0;

	if (c->dir_check == NULL)
		rc = sfr_check_new_part(c->fd, c->base, c->result.nbytes,
					SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &c->dir_check);
	if (rc == 0)
		rc = sfr_check_run(c->dir_check, sfr__time_left(c->deadline_ns));
	if (rc != 0)
		return rc;
	return c->dir_check->result.ok ? sfr__check_start_reader(c) : SFR_ECORRUPT;
}

/* The step SUMS: starts the reader, or waits for it. */
static int check_sums(struct sfr_check *c)
{
	const bool started = c->reader != NULL;
	int rc = started ? sfr__check_await_reader(c) : check_dir_and_start_reader(c);

	if (rc == SFR_EAGAIN)
		return 0; /* the state stays SUMS: the step is tried again */
	if (!started && rc == 0)
		return 0; /* the reader runs now: the next step waits for it */
	if (started && rc != -EOPNOTSUPP && rc != SFR_EFORK)
		return rc; /* the reader has ended, and its result is final */
	/* the reader could not be started, or cannot read this file: the walk checks it */
	free_reader_and_dir_check(c);
	c->body_pos = c->reported_pos = 0;
	c->state = SFR__CHECK_RECORD;
	return 0;
}

/* ---- SORT and NAMES ---------------------------------------------------------- */

/* Reads the name of the directory record at `off` into c->name again, and sets c->rec.name_len.
 * Returns 0, or a code for sfr__check_handle_read_error. */
static int reread_name(struct sfr_check *c, uint64_t off)
{
	size_t len = SFR__UNZIP_CENTRAL_LEN;
	const unsigned char *entry;
	int rc = sfr__window_get(&c->dir_window, off, len, sfr__check_get_dir_end_off(c), &entry,
				 NULL);

	if (rc != 0)
		return rc;
	/* the record was valid before, but the file may have been changed since */
	if (sfr__unzip_parse_central(entry, &c->rec) != NULL ||
	    c->rec.name_len > sfr__check_get_dir_end_off(c) - off - len)
		return SFR_ECORRUPT;
	len += c->rec.name_len;
	rc = sfr__window_get(&c->dir_window, off, len, sfr__check_get_dir_end_off(c), &entry, NULL);
	if (rc != 0)
		return rc;
	memcpy(c->name, entry + SFR__UNZIP_CENTRAL_LEN, c->rec.name_len);
	c->name[c->rec.name_len] = '\0';
	return 0;
}

/* Compares the names of the directory records at two offsets. If they are equal, the second record
 * is bad. Returns 0, SFR_EAGAIN or -errno. */
static int check_names_differ(struct sfr_check *c, uint64_t first, uint64_t second)
{
	char first_name[sizeof(c->name)];
	size_t first_len;
	int rc = reread_name(c, first);

	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	first_len = c->rec.name_len;
	memcpy(first_name, c->name, first_len);
	rc = reread_name(c, second);
	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	if (first_len != c->rec.name_len || memcmp(first_name, c->name, first_len) != 0)
		return 0;
	return sfr__check_add_bad_record(c, "its name occurs twice");
}

static int continue_sorting_names(struct sfr_check *c)
{
	if (sfr__names_continue_sort(&c->names, MOVES_PER_STEP))
		c->state = SFR__CHECK_NAMES;
	return 0;
}

/* Decides whether the file is a complete checkpoint, and ends the check. Returns 0. */
static int give_verdict(struct sfr_check *c)
{
	const bool ok = c->result.nr_bad == 0;

	/* only if no record is damaged: the missing one may be among the damaged ones */
	if (ok && !c->has_pickle)
		return sfr__check_end_with_damage(
			c, "it is not a torch.save file: the archive has no record data.pkl");
	if (ok && !c->has_version)
		return sfr__check_end_with_damage(
			c, "it is not a torch.save file: the archive has no record version");
	c->result.ok = ok;
	c->body_pos = c->result.nbytes;
	c->state = SFR__CHECK_DONE;
	return 0;
}

/* Compares the next two names with the same hash. The first two equal names end the check, because
 * a hostile file may have a million of them. */
static int check_next_same_hash_names(struct sfr_check *c)
{
	const uint64_t nr_bad = c->result.nr_bad;
	uint64_t names_pos = c->names_pos, first, second;
	int rc;

	if (!sfr__names_next_same_hash(&c->names, &names_pos, &first, &second))
		return give_verdict(c);
	rc = check_names_differ(c, first, second);
	if (rc != SFR_EAGAIN) /* else the step is tried again with the same names */
		c->names_pos = names_pos;
	if (rc != 0 || c->state == SFR__CHECK_DONE)
		return rc;
	if (c->result.nr_bad != nr_bad) /* the names were equal */
		return give_verdict(c);
	if (++c->nr_same_hash > SAME_HASH_MAX)
		return sfr__check_end_with_damage(
			c, "the names of its records were chosen to be slow to tell apart");
	return 0;
}

uint64_t sfr__check_find_record(const struct sfr_check *c, const char *short_name, size_t len)
{
	char name[SFR__UNZIP_NAME_MAX];
	uint64_t pos = 0, entry_off;

	if (len > sizeof(name) - c->prefix_len)
		return c->listing.nr;
	memcpy(name, c->prefix, c->prefix_len);
	memcpy(name + c->prefix_len, short_name, len);
	len += c->prefix_len;
	while (sfr__names_find_hash_match(&c->names, name, len, &pos, &entry_off)) {
		uint64_t index = sfr__listing_find(&c->listing, entry_off);
		const struct sfr__listed_record *listed = &c->listing.records[index];

		if (index < c->listing.nr && listed->name_len == len &&
		    memcmp(c->listing.names + listed->name_off, name, len) == 0)
			return index;
	}
	return c->listing.nr;
}

/* ---- public ------------------------------------------------------------------ */

int sfr_check_new_part(int fd, uint64_t off, uint64_t len, unsigned flags, struct sfr_check **out)
{
	struct sfr_check *c;

	*out = NULL;
	/* the combinations that check.h excludes */
	if ((flags & SFR_CHECK_BYTES) != 0 &&
	    (flags & (SFR_CHECK_DIRECTORY | SFR_CHECK_LATER)) != 0)
		return -EINVAL;
	if ((flags & SFR_CHECK_KEEP) != 0 && (flags & SFR_CHECK_DIRECTORY) == 0)
		return -EINVAL;
	c = sfr_sys.calloc(1, sizeof(*c));
	*out = c;
	if (c == NULL)
		return -ENOMEM;
	c->fd = fd;
	c->base = off;
	c->result.nbytes = len;
	c->flags = flags;
	return 0;
}

int sfr_check_new(int fd, unsigned flags, struct sfr_check **out)
{
	return sfr_check_new_part(fd, 0, SFR_CHECK_WHOLE, flags, out);
}

int sfr_check_run(struct sfr_check *check, uint64_t slice_ns)
{
	static int (*const steps[])(struct sfr_check *) = {
		[SFR__CHECK_START] = start_check,
		[SFR__CHECK_SUMS] = check_sums,
		[SFR__CHECK_RECORD] = sfr__check_next_record,
		[SFR__CHECK_BYTES] = sfr__check_record_bytes,
		[SFR__CHECK_SORT] = continue_sorting_names,
		[SFR__CHECK_NAMES] = check_next_same_hash_names,
	};
	const uint64_t deadline = sfr__deadline(slice_ns);

	check->deadline_ns = deadline;
	while (check->code == 0 && check->state != SFR__CHECK_DONE) {
		check->code = steps[check->state](check);
		if (check->code == SFR_EAGAIN)
			check->code = 0; /* the step is tried again */
		if (check->code == 0 && check->state != SFR__CHECK_DONE &&
		    deadline != SFR_FOREVER && sfr__now_ns() >= deadline)
			return SFR_EAGAIN;
	}
	return check->code;
}

uint64_t sfr_check_bytes_done(const struct sfr_check *check)
{
	return check->body_pos;
}

bool sfr_check_has_os_error(const struct sfr_check *check)
{
	return check->os_error;
}

const struct sfr_check_result *sfr_check_result(const struct sfr_check *check)
{
	return &check->result;
}

void sfr_check_free(struct sfr_check *check)
{
	if (check == NULL)
		return;
	for (uint32_t i = 0; i < check->result.nr_listed; i++)
		sfr_sys.free(check->bad[i].name);
	sfr_sys.free(check->bad);
	free_reader_and_dir_check(check);
	sfr__names_fini(&check->names);
	sfr__listing_fini(&check->listing);
	sfr__window_fini(&check->dir_window);
	sfr__window_fini(&check->body_window);
	sfr_sys.free(check);
}
