/* ACL graphs: work of streams that is kept instead of run, and run as often as the graph is executed.
 *
 * A capture begins on one stream. Another takes part once it waits for an event that was recorded in it, and
 * the first stream must wait for that one in turn. What they are given meanwhile is kept, and runs in the order
 * of the calls on the stream that executes the graph.
 *
 * Refused, and it spoils the capture, whose end then fails: whatever waits for a stream or event of it on the
 * host, and synchronous copies and fills, as asynchronous copies of pageable memory are; in mode GLOBAL from
 * every thread, in THREAD_LOCAL from the one that began. That is CANN's documentation. It says nothing of waits
 * for events from outside of the capture, which are refused as CUDA does. Simplified: one capture at a time in
 * a process, streams are waited for by the first one itself, collectives and groups of tasks are missing, and
 * operators that the double computes: it does so at the call. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ascend_sim.h"

enum { MOST_STREAMS = 16 };

struct kept {
    sim_work work;
    size_t size;
    struct kept *next;
    _Alignas(max_align_t) char argument[];
};

struct part {
    aclrtStream stream;
    uint64_t calls;      /* that were kept, and the wait by which it came in */
    uint64_t waited_for; /* of these, by the first stream */
};

struct graph {
    uint64_t number; /* of the capture, from 1 */
    aclmdlRICaptureMode mode;
    pthread_t thread;
    bool spoiled;
    struct part parts[MOST_STREAMS];
    int count;
    struct kept *first;
    struct kept **end;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static struct graph *active;
static uint64_t last_number;
static _Thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

static int place_of(aclrtStream stream) {
    int place = active == NULL ? -1 : active->count - 1;
    while (place >= 0 && active->parts[place].stream != stream) {
        place--;
    }
    return place;
}

static aclError spoil(aclError code, const char *what) {
    active->spoiled = true;
    return sim_fail(code, "%s spoils the graph that is captured", what);
}

static void let_go(struct graph *graph) {
    struct kept *next = NULL;
    for (struct kept *kept = graph->first; kept != NULL; kept = next) {
        next = kept->next;
        free(kept);
    }
    free(graph);
}

bool sim_keep(aclrtStream stream, sim_work work, const void *argument, size_t size) {
    pthread_mutex_lock(&lock);
    const int place = place_of(stream);
    if (place >= 0) {
        struct kept *kept = sim_new(sizeof *kept + size);
        kept->work = work;
        kept->size = size;
        memcpy(kept->argument, argument, size);
        *active->end = kept;
        active->end = &kept->next;
        active->parts[place].calls++;
    }
    pthread_mutex_unlock(&lock);
    return place >= 0;
}

aclError sim_refuse_blocking(const char *what) {
    aclError status = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (active != NULL && active->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED) {
        const bool own = pthread_equal(active->thread, pthread_self());
        const bool all = active->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
        if (own ? thread_mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED
                : all && thread_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL) {
            status = spoil(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, what);
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

aclError sim_refuse_wait(aclrtStream stream) {
    aclError status = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (place_of(stream) >= 0) {
        status = spoil(ACL_ERROR_RT_STREAM_CAPTURED, "the host's wait for a stream");
    }
    pthread_mutex_unlock(&lock);
    return status;
}

aclError sim_refuse_captured(struct sim_captured event) {
    aclError status = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (active != NULL && active->number == event.capture) {
        status = spoil(ACL_ERROR_RT_EVENT_CAPTURED, "the host's look at an event");
    } else if (event.capture != 0) {
        status = sim_fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded in a graph: record it anew");
    }
    pthread_mutex_unlock(&lock);
    return status;
}

struct sim_captured sim_record_captured(aclrtStream stream) {
    struct sim_captured event = {.capture = 0};
    pthread_mutex_lock(&lock);
    const int place = place_of(stream);
    if (place >= 0) {
        event.capture = active->number;
        event.place = place;
        event.calls = active->parts[place].calls;
    }
    pthread_mutex_unlock(&lock);
    return event;
}

static aclError wait_inside(int place, aclrtStream stream, struct sim_captured event) {
    struct part *waited_for = &active->parts[event.place];
    if (place == 0) {
        waited_for->waited_for = event.calls;
    } else if (place < 0 && active->count == MOST_STREAMS) {
        return spoil(ACL_ERROR_RT_NO_STREAM_RESOURCE, "one more stream");
    } else if (place < 0) {
        active->parts[active->count++] = (struct part){.stream = stream, .calls = 1};
    }
    return ACL_SUCCESS;
}

aclError sim_wait_captured(aclrtStream stream, struct sim_captured event, bool *captured) {
    aclError status = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    const int place = place_of(stream);
    *captured = place >= 0 || event.capture != 0;
    if (active != NULL && active->number == event.capture) {
        status = wait_inside(place, stream, event);
    } else if (place >= 0) {
        status = spoil(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a wait for an event from outside");
    } else if (event.capture != 0) {
        status = sim_fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded in a graph: record it anew");
    }
    pthread_mutex_unlock(&lock);
    return status;
}

SIM_API aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    aclError status = ACL_SUCCESS;
    if (stream == NULL) {
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
    }
    pthread_mutex_lock(&lock);
    if (active != NULL) {
        status = sim_fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "one capture at a time is simulated");
    } else {
        active = sim_new(sizeof *active);
        *active = (struct graph){.number = ++last_number, .mode = mode, .thread = pthread_self(), .count = 1};
        active->parts[0].stream = stream;
        active->end = &active->first;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

SIM_API aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
    pthread_mutex_lock(&lock);
    const bool captured = place_of(stream) >= 0;
    *graph = captured ? active : NULL;
    *status = !captured         ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : active->spoiled ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

static aclError check_end(aclrtStream stream) {
    if (place_of(stream) != 0) {
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "no capture was begun on this stream");
    }
    if (active->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && !pthread_equal(active->thread, pthread_self())) {
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "another thread began the capture");
    }
    return ACL_SUCCESS;
}

static aclError check_whole(void) {
    if (active->spoiled) {
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture was spoiled");
    }
    for (int place = 1; place < active->count; place++) {
        if (active->parts[place].waited_for != active->parts[place].calls) {
            return sim_fail(ACL_ERROR_RT_STREAM_UNJOINED, "stream %d of the capture is not waited for", place);
        }
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *out) {
    pthread_mutex_lock(&lock);
    aclError status = check_end(stream);
    *out = NULL;
    if (status == ACL_SUCCESS) {
        status = check_whole();
        if (status == ACL_SUCCESS) {
            *out = active;
        } else {
            let_go(active);
        }
        active = NULL;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

SIM_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    const aclmdlRICaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
    const struct graph *graph = handle;
    aclError status = ACL_SUCCESS;
    for (const struct kept *kept = graph->first; status == ACL_SUCCESS && kept != NULL; kept = kept->next) {
        status = sim_enqueue(stream, kept->work, kept->argument, kept->size);
    }
    return status;
}

SIM_API aclError aclmdlRIDestroy(aclmdlRI graph) {
    let_go(graph);
    return ACL_SUCCESS;
}
