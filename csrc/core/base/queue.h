/* First-in, first-out queues of structs that are linked through a member `next`.
 *
 *     SFR__QUEUE(struct job) jobs;    all zero is empty
 *     sfr__queue_push(&jobs, job);
 *     job = sfr__queue_pop(&jobs);    NULL when there is none
 *
 * An item is in at most one queue. The queue has no lock: its owner protects it. */
#ifndef SFR_QUEUE_H
#define SFR_QUEUE_H

#include <stddef.h>

#define SFR__QUEUE(type)                                                                           \
	struct {                                                                                   \
		type *head, *tail;                                                                 \
	}

#define sfr__queue_push(queue, item)                                                               \
	__extension__({                                                                            \
		(item)->next = NULL;                                                               \
		if ((queue)->tail)                                                                 \
			(queue)->tail->next = (item);                                              \
		else                                                                               \
			(queue)->head = (item);                                                    \
		(queue)->tail = (item);                                                            \
	})

#define sfr__queue_pop(queue)                                                                      \
	__extension__({                                                                            \
		__typeof__((queue)->head) sfr__first = (queue)->head;                              \
		if (sfr__first) {                                                                  \
			(queue)->head = sfr__first->next;                                          \
			if (!(queue)->head)                                                        \
				(queue)->tail = NULL;                                              \
		}                                                                                  \
		sfr__first;                                                                        \
	})

/* Work for one of the core's threads, embedded in an object. `run` is called once, with no lock
 * held, and may free the object. */
struct sfr__task {
	struct sfr__task *next;
	void (*run)(struct sfr__task *task);
};

#endif
