/* Removes: entries of the log that remove a file, a link or a directory tree.
 *
 * A remove is dropped, with a notice, if the last save in front of it did not become durable. A
 * failed remove is reported by a notice, too, because no caller waits for it.
 *
 * A remove is not synced: after a power failure, the old checkpoint may be there again. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "commit/log.h"
#include "file/file.h"
#include "trace/trace.h"

static void remove_or_report(struct sfr__log_entry *entry, bool last_save_ok)
{
	const char *path = entry->key;
	struct sfr_err err = { .index = -1 };

	SFR__TRACE(SFR_TRACE_REMOVE, 0, 0);
	if (!last_save_ok) {
		sfr__notice_post_text(
			"%s was not removed: the save before it did not become durable", path);
	} else if (sfr__file_remove_tree(path, &entry->fs_wait_since_ns, &err) < 0) {
		sfr__notice_post_text("%s could not be removed: %s", path,
				      sfr_code_message(err.code));
	}
}

static void run_remove(struct sfr__log_entry *entry, bool last_save_ok)
{
	remove_or_report(entry, last_save_ok);
	sfr__log_mark_ended(entry, true); /* also after a failure, which was only reported */
}

static void free_entry(struct sfr__log_entry *entry)
{
	sfr_sys.free(entry->key);
	sfr_sys.free(entry);
}

/* Returns st_dev of the key's directory, or 0 if that fails. */
static uint64_t file_system_of(const char *key)
{
	char parent[SFR_PATH_MAX];
	const char *slash = strrchr(key, '/');
	size_t len;
	struct stat st;

	if (!slash)
		return 0;
	len = slash == key ? 1 : (size_t)(slash - key); /* the parent of "/name" is "/" */
	if (len >= sizeof(parent))
		return 0;
	memcpy(parent, key, len);
	parent[len] = '\0';
	return sfr_sys.lstat(AT_FDCWD, parent, &st) < 0 ? 0 : (uint64_t)st.st_dev;
}

int sfr_log_append_remove(const char *key, uint64_t *seq_out)
{
	static const struct sfr__log_ops ops = { .close_waits = true,
						 .run = run_remove,
						 .release = free_entry };
	struct sfr__log_entry *entry;
	uint64_t seq;
	int rc = sfr_fork_init();

	if (rc < 0)
		return rc;
	entry = sfr_sys.calloc(1, sizeof(*entry));
	if (!entry)
		return -ENOMEM;
	entry->ops = &ops;
	entry->state = SFR__LOG_READY;
	entry->key = sfr__text_copy(key);
	entry->fs = file_system_of(key);
	rc = entry->key ? sfr__log_reserve() : -ENOMEM;
	if (rc < 0) {
		free_entry(entry);
		return rc;
	}
	seq = sfr__log_append(entry);
	if (seq_out)
		*seq_out = seq;
	return 0;
}
