/* Events. Recording puts a mark on a stream; the host or another stream can wait for the last one asked for.
 *
 * A stream that failed hands its error to the events that it records, and a stream that waits for such an
 * event fails too: work that depends on a failed copy does not look done. An event that was never recorded
 * is "not ready" when queried, while waiting for it returns at once. Not simulated: sharing events between
 * processes, flags, and any limit to their number. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ascend_sim.h"

struct event {
    pthread_mutex_t lock;
    pthread_cond_t recorded;
    int users; /* the handle, and work in queues */
    uint64_t asked;
    uint64_t done;
    uint64_t stamp_ns; /* of the last mark */
    struct sim_captured captured;
    aclError error;    /* of the last mark's stream */
    char message[SIM_MESSAGE_BYTES];
};

/* Work that needs the event, and which of its marks. */
struct mark {
    struct event *event;
    uint64_t number;
};

static void drop_user(struct event *event) {
    pthread_mutex_lock(&event->lock);
    int users = --event->users;
    pthread_mutex_unlock(&event->lock);
    if (users == 0) {
        free(event);
    }
}

SIM_API aclError aclrtCreateEventExWithFlag(aclrtEvent *out, UNUSED uint32_t flags) {
    struct event *event = sim_new(sizeof *event);
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->recorded, NULL);
    event->users = 1;
    *out = event;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flags) {
    return aclrtCreateEventExWithFlag(out, flags);
}

SIM_API aclError aclrtCreateEvent(aclrtEvent *out) {
    return aclrtCreateEventExWithFlag(out, 0);
}

SIM_API aclError aclrtDestroyEvent(aclrtEvent handle) {
    drop_user(handle);
    return ACL_SUCCESS;
}

static struct mark new_mark(struct event *event) {
    pthread_mutex_lock(&event->lock);
    event->users++;
    struct mark mark = {.event = event, .number = ++event->asked};
    pthread_mutex_unlock(&event->lock);
    return mark;
}

static struct mark last_mark(struct event *event) {
    pthread_mutex_lock(&event->lock);
    event->users++;
    struct mark mark = {.event = event, .number = event->asked};
    pthread_mutex_unlock(&event->lock);
    return mark;
}

static aclError make_mark(void *argument) {
    const struct mark *mark = argument;
    struct event *event = mark->event;
    struct timespec now;
    aclError error = sim_running_stream_error();
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&event->lock);
    if (mark->number > event->done) {
        event->done = mark->number;
        event->error = error;
        memcpy(event->message, sim_message(), sizeof event->message);
    }
    event->stamp_ns = (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
    pthread_cond_broadcast(&event->recorded);
    pthread_mutex_unlock(&event->lock);
    drop_user(event);
    return ACL_SUCCESS;
}

static aclError wait_for(struct event *event, uint64_t number, long milliseconds) {
    const struct timespec end = sim_deadline(milliseconds);
    int timed_out = 0;
    pthread_mutex_lock(&event->lock);
    while (event->done < number && timed_out == 0) {
        timed_out = pthread_cond_timedwait(&event->recorded, &event->lock, &end);
    }
    aclError error = event->error;
    if (timed_out == 0 && error != ACL_SUCCESS) {
        sim_take_message(event->message);
    }
    pthread_mutex_unlock(&event->lock);
    return timed_out == 0 ? error : sim_fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "event: not recorded in time");
}

static aclError wait_on_stream(void *argument) {
    const struct mark *mark = argument;
    aclError status = wait_for(mark->event, mark->number, SIM_FOREVER_MS);
    drop_user(mark->event);
    return status;
}

static aclError enqueue_mark(aclrtStream stream, sim_work work, struct mark mark) {
    aclError status = sim_enqueue(stream, work, &mark, sizeof mark);
    if (status != ACL_SUCCESS) {
        drop_user(mark.event);
    }
    return status;
}

static struct sim_captured captured_in(struct event *event) {
    pthread_mutex_lock(&event->lock);
    struct sim_captured captured = event->captured;
    pthread_mutex_unlock(&event->lock);
    return captured;
}

SIM_API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
    struct event *event = handle;
    const struct sim_captured captured = sim_record_captured(stream);
    pthread_mutex_lock(&event->lock);
    event->captured = captured;
    pthread_mutex_unlock(&event->lock);
    return captured.capture != 0 ? ACL_SUCCESS : enqueue_mark(stream, make_mark, new_mark(event));
}

SIM_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
    bool captured = false;
    aclError status = sim_wait_captured(stream, captured_in(handle), &captured);
    return captured ? status : enqueue_mark(stream, wait_on_stream, last_mark(handle));
}

/* A wait counts marks, so an event can be recorded again without a reset. */
SIM_API aclError aclrtResetEvent(UNUSED aclrtEvent handle, UNUSED aclrtStream stream) {
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t milliseconds) {
    aclError refusal = sim_refuse_captured(captured_in(handle));
    if (refusal != ACL_SUCCESS) {
        return refusal;
    }
    const struct mark mark = last_mark(handle);
    aclError status = wait_for(mark.event, mark.number, milliseconds);
    drop_user(mark.event);
    return status;
}

SIM_API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    return aclrtSynchronizeEventWithTimeout(handle, SIM_FOREVER_MS);
}

static aclError query(struct event *event, bool *complete) {
    aclError refusal = sim_refuse_captured(captured_in(event));
    *complete = false;
    if (refusal != ACL_SUCCESS) {
        return refusal;
    }
    pthread_mutex_lock(&event->lock);
    *complete = event->asked > 0 && event->done == event->asked;
    aclError error = *complete ? event->error : ACL_SUCCESS;
    if (error != ACL_SUCCESS) {
        sim_take_message(event->message);
    }
    pthread_mutex_unlock(&event->lock);
    return error;
}

SIM_API aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *state) {
    bool complete;
    aclError error = query(handle, &complete);
    *state = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return error;
}

SIM_API aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *state) {
    bool complete;
    aclError error = query(handle, &complete);
    *state = complete ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return error;
}

static uint64_t stamp_of(struct event *event) {
    pthread_mutex_lock(&event->lock);
    uint64_t stamp = event->stamp_ns;
    pthread_mutex_unlock(&event->lock);
    return stamp;
}

SIM_API aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent from, aclrtEvent to) {
    const uint64_t start = stamp_of(from);
    const uint64_t end = stamp_of(to);
    if (start == 0 || end == 0) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "time between events of which one was not recorded");
    }
    *milliseconds = (float)(((double)end - (double)start) / 1e6);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t *microseconds) {
    *microseconds = stamp_of(handle) / 1000;
    return ACL_SUCCESS;
}
