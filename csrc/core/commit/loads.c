/* Loads: files opened for reading at their position in the log.
 *
 * A load is attached to the last pending entry of its name. When that entry has ended, the log's
 * thread opens the file, before a later entry can rename or remove the name. */
#include <errno.h>
#include <fcntl.h>

#include "commit/log_int.h"

struct sfr_log_load {
	struct sfr_log_load *next; /* the next load attached to the same entry */
	uint64_t fork_generation;
	char *key;
	bool attached; /* to an entry; otherwise sfr_log_load_wait opens the file */
	/* guarded by the log's mutex */
	bool opened;    /* a thread of the log has opened the file, or failed to */
	bool abandoned; /* the caller has freed the load: a thread of the log frees its memory */
	int fd;         /* the descriptor, or -errno; -1: not opened, or taken by the caller */
};

/* Opens the file for reading. Returns a descriptor or -errno. */
static int open_for_reading(const char *key)
{
	int fd = -1;

	for (int tries = 0; tries < SFR__EINTR_TRIES; tries++) {
		/* O_NONBLOCK, because opening a FIFO must not block the log */
		fd = sfr_sys.open(AT_FDCWD, key, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
		if (fd >= 0 || errno != EINTR)
			break;
	}
	return fd < 0 ? -errno : fd;
}

void sfr__log_open_loads(struct sfr_log_load *load)
{
	while (load) {
		struct sfr_log_load *next = load->next;
		int fd = open_for_reading(load->key);

		sfr__lock(&sfr__log.mu);
		load->fd = fd;
		load->opened = true;
		if (load->abandoned) {
			sfr__unlock(&sfr__log.mu);
			sfr_log_load_free(load);
		} else {
			pthread_cond_broadcast(&sfr__log.cv_done);
			sfr__unlock(&sfr__log.mu);
		}
		load = next;
	}
}

int sfr_log_load_new(const char *key, struct sfr_log_load **out)
{
	struct sfr_log_load *load = sfr_sys.calloc(1, sizeof(*load));
	struct sfr__log_entry *e;
	int rc;

	*out = NULL;
	if (!load)
		return -ENOMEM;
	load->fd = -1;
	load->fork_generation = sfr_fork_generation();
	load->key = sfr__text_copy(key);
	if (!load->key) {
		sfr_sys.free(load);
		return -ENOMEM;
	}
	sfr__lock(&sfr__log.mu);
	rc = sfr__log_init_locked();
	e = rc == 0 ? sfr__log_last_concerning_locked(key, NULL) : NULL;
	if (e) {
		load->attached = true;
		load->next = e->loads;
		e->loads = load;
		/* If the entry has already ended, a thread opens the load at once. */
		pthread_cond_signal(&sfr__log.cv_work);
	}
	sfr__unlock(&sfr__log.mu);
	if (rc < 0) {
		sfr_sys.free(load->key);
		sfr_sys.free(load);
		return rc;
	}
	*out = load;
	return 0;
}

int sfr_log_load_wait(struct sfr_log_load *load, uint64_t slice_ns, int *fd_out)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	*fd_out = -1;
	if (load->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (!load->attached) {
		int fd = open_for_reading(load->key);

		if (fd < 0)
			return fd;
		*fd_out = fd;
		return 0;
	}
	sfr__lock(&sfr__log.mu);
	while (!load->opened && rc == 0)
		rc = sfr__cond_wait(&sfr__log.cv_done, &sfr__log.mu, deadline);
	if (load->opened) {
		rc = load->fd < 0 ? load->fd : 0;
		*fd_out = load->fd < 0 ? -1 : load->fd;
		load->fd = -1; /* the caller owns the descriptor now */
	}
	sfr__unlock(&sfr__log.mu);
	return rc;
}

void sfr_log_load_free(struct sfr_log_load *load)
{
	bool pending;

	if (!load || load->fork_generation != sfr_fork_generation())
		return;
	sfr__lock(&sfr__log.mu);
	pending = load->attached && !load->opened;
	load->abandoned = pending;
	sfr__unlock(&sfr__log.mu);
	if (pending)
		return; /* sfr__log_open_loads frees the load */
	if (load->fd >= 0)
		(void)sfr_sys.close(load->fd); /* nothing to lose: opened for reading */
	sfr_sys.free(load->key);
	sfr_sys.free(load);
}
