/* Streams. Each is a thread with a queue, so work is asynchronous to its caller and to other streams.
 *
 * A failure of queued work is kept in its stream and given out by the next wait for the stream; until then
 * events that the stream records carry it (events.c). Simplified: work that follows a failure still runs,
 * priorities and flags change nothing, and there is no limit to the number of streams. A child of fork()
 * has no threads and must not use the device, as on the real machine. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ascend_sim.h"

struct task {
    sim_work work;
    struct task *next;
    _Alignas(max_align_t) char argument[];
};

struct stream {
    int id;
    int device; /* in this process's numbers */
    int users;  /* under streams_lock: the handle, and threads that wait for the whole device */
    bool stopping;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    pthread_cond_t progressed;
    struct task *first;
    struct task *last;
    uint64_t queued;
    uint64_t done;
    aclError error;
    char message[SIM_MESSAGE_BYTES];
    struct stream *next;
};

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams;
static struct stream *default_streams[SIM_MAX_DEVICES];
static int last_id;
static _Thread_local struct stream *running; /* set in a stream's own thread */

static struct task *next_task(struct stream *stream) {
    pthread_mutex_lock(&stream->lock);
    while (stream->first == NULL && !stream->stopping) {
        pthread_cond_wait(&stream->has_work, &stream->lock);
    }
    struct task *task = stream->first;
    if (task != NULL) {
        stream->first = task->next;
    }
    if (stream->first == NULL) {
        stream->last = NULL;
    }
    pthread_mutex_unlock(&stream->lock);
    return task;
}

static void *serve(void *argument) {
    struct stream *stream = argument;
    struct task *task;
    sim_become_thread_of(stream->device);
    running = stream;
    while ((task = next_task(stream)) != NULL) {
        aclError status = task->work(task->argument);
        free(task);
        pthread_mutex_lock(&stream->lock);
        if (status != ACL_SUCCESS && stream->error == ACL_SUCCESS) {
            stream->error = status;
            memcpy(stream->message, sim_message(), sizeof stream->message);
        }
        stream->done++;
        pthread_cond_broadcast(&stream->progressed);
        pthread_mutex_unlock(&stream->lock);
    }
    return NULL;
}

/* With streams_lock held. */
static aclError start_stream(struct stream **out) {
    struct stream *stream = sim_new(sizeof *stream);
    stream->device = sim_current_device();
    stream->id = ++last_id;
    stream->users = 1;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->has_work, NULL);
    pthread_cond_init(&stream->progressed, NULL);
    if (pthread_create(&stream->thread, NULL, serve, stream) != 0) {
        free(stream);
        return sim_fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "the host has no thread left for a stream");
    }
    stream->next = streams;
    streams = stream;
    *out = stream;
    return ACL_SUCCESS;
}

static void drop_user(struct stream *stream) {
    pthread_mutex_lock(&streams_lock);
    int users = --stream->users;
    pthread_mutex_unlock(&streams_lock);
    if (users == 0) {
        free(stream);
    }
}

/* The stream of a handle; the handle NULL is the default stream of the thread's device. */
static aclError find_stream(aclrtStream handle, struct stream **out) {
    const int device = sim_current_device();
    aclError status = ACL_SUCCESS;
    if (handle != NULL) {
        *out = handle;
        return ACL_SUCCESS;
    }
    if (device == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "the default stream, with no device set in this thread");
    }
    pthread_mutex_lock(&streams_lock);
    if (default_streams[device] == NULL) {
        status = start_stream(&default_streams[device]);
    }
    *out = default_streams[device];
    pthread_mutex_unlock(&streams_lock);
    return status;
}

SIM_API aclError aclrtCreateStreamWithConfig(aclrtStream *out, UNUSED uint32_t priority, UNUSED uint32_t flags) {
    struct stream *stream = NULL;
    if (sim_current_device() == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device set in this thread");
    }
    pthread_mutex_lock(&streams_lock);
    aclError status = start_stream(&stream);
    pthread_mutex_unlock(&streams_lock);
    *out = stream;
    return status;
}

SIM_API aclError aclrtCreateStream(aclrtStream *out) {
    return aclrtCreateStreamWithConfig(out, 0, 0);
}

/* Waits for the stream's work, as CANN does. */
SIM_API aclError aclrtDestroyStream(aclrtStream handle) {
    struct stream *stream = handle;
    if (stream == NULL) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "the default stream cannot be destroyed");
    }
    pthread_mutex_lock(&streams_lock);
    struct stream **place = &streams;
    while (*place != NULL && *place != stream) {
        place = &(*place)->next;
    }
    bool known = *place != NULL;
    if (known) {
        *place = stream->next;
    }
    pthread_mutex_unlock(&streams_lock);
    if (!known) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "%p is not a stream", handle);
    }
    pthread_mutex_lock(&stream->lock);
    stream->stopping = true;
    pthread_cond_signal(&stream->has_work);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    drop_user(stream);
    return ACL_SUCCESS;
}

/* CANN drops the work that has not started; here it is waited for. */
SIM_API aclError aclrtDestroyStreamForce(aclrtStream handle) {
    return aclrtDestroyStream(handle);
}

aclError sim_enqueue(aclrtStream handle, sim_work work, const void *argument, size_t size) {
    struct stream *stream = NULL;
    aclError status = find_stream(handle, &stream);
    if (status != ACL_SUCCESS || sim_keep(handle, work, argument, size)) {
        return status;
    }
    struct task *task = sim_new(sizeof *task + size);
    task->work = work;
    memcpy(task->argument, argument, size);
    pthread_mutex_lock(&stream->lock);
    if (stream->last != NULL) {
        stream->last->next = task;
    } else {
        stream->first = task;
    }
    stream->last = task;
    stream->queued++;
    pthread_cond_signal(&stream->has_work);
    pthread_mutex_unlock(&stream->lock);
    return ACL_SUCCESS;
}

aclError sim_running_stream_error(void) {
    if (running == NULL) {
        return ACL_SUCCESS;
    }
    pthread_mutex_lock(&running->lock);
    aclError error = running->error;
    if (error != ACL_SUCCESS) {
        sim_take_message(running->message);
    }
    pthread_mutex_unlock(&running->lock);
    return error;
}

/* Waits for the work that was queued before the call, then gives out the stream's failure. */
static aclError wait_for(struct stream *stream, long milliseconds) {
    const struct timespec end = sim_deadline(milliseconds);
    int timed_out = 0;
    pthread_mutex_lock(&stream->lock);
    const uint64_t wanted = stream->queued;
    while (stream->done < wanted && timed_out == 0) {
        timed_out = pthread_cond_timedwait(&stream->progressed, &stream->lock, &end);
    }
    aclError error = ACL_SUCCESS;
    if (timed_out == 0) {
        error = stream->error;
        stream->error = ACL_SUCCESS;
    }
    if (error != ACL_SUCCESS) {
        sim_take_message(stream->message);
    }
    pthread_mutex_unlock(&stream->lock);
    return timed_out == 0 ? error
                          : sim_fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d: not done in time", stream->id);
}

aclError sim_synchronize(aclrtStream handle, long milliseconds) {
    struct stream *stream = NULL;
    aclError status = find_stream(handle, &stream);
    if (status == ACL_SUCCESS) {
        status = sim_refuse_wait(handle);
    }
    return status == ACL_SUCCESS ? wait_for(stream, milliseconds) : status;
}

SIM_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t milliseconds) {
    return sim_synchronize(handle, milliseconds);
}

SIM_API aclError aclrtSynchronizeStream(aclrtStream handle) {
    return sim_synchronize(handle, SIM_FOREVER_MS);
}

/* One more stream of this device with a number below `below`; the caller drops it. */
static struct stream *stream_below(int device, int below) {
    pthread_mutex_lock(&streams_lock);
    struct stream *stream = streams; /* the newest, so that of the highest number, first */
    while (stream != NULL && (stream->device != device || stream->id >= below)) {
        stream = stream->next;
    }
    if (stream != NULL) {
        stream->users++;
    }
    pthread_mutex_unlock(&streams_lock);
    return stream;
}

SIM_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
    const int device = sim_current_device();
    aclError first_error = ACL_SUCCESS;
    int below = INT32_MAX;
    struct stream *stream = NULL;
    if (device == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device set in this thread");
    }
    while ((stream = stream_below(device, below)) != NULL) {
        aclError error = sim_synchronize(stream, milliseconds);
        if (first_error == ACL_SUCCESS) {
            first_error = error;
        }
        below = stream->id;
        drop_user(stream);
    }
    return first_error;
}

SIM_API aclError aclrtSynchronizeDevice(void) {
    return aclrtSynchronizeDeviceWithTimeout(SIM_FOREVER_MS);
}

SIM_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *state) {
    struct stream *stream = NULL;
    aclError status = find_stream(handle, &stream);
    if (status == ACL_SUCCESS) {
        status = sim_refuse_wait(handle);
    }
    if (status != ACL_SUCCESS) {
        return status;
    }
    pthread_mutex_lock(&stream->lock);
    *state = stream->done == stream->queued ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    pthread_mutex_unlock(&stream->lock);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    struct stream *stream = NULL;
    aclError status = find_stream(handle, &stream);
    if (status == ACL_SUCCESS) {
        *id = stream->id;
    }
    return status;
}

SIM_API aclError aclrtSetStreamFailureMode(UNUSED aclrtStream handle, UNUSED uint64_t mode) {
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetStreamOverflowSwitch(UNUSED aclrtStream handle, UNUSED uint32_t flag) {
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetStreamOverflowSwitch(UNUSED aclrtStream handle, uint32_t *flag) {
    *flag = 0;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetStreamAttribute(UNUSED aclrtStream handle, UNUSED aclrtStreamAttr attribute,
                                         UNUSED aclrtStreamAttrValue *value) {
    return ACL_SUCCESS;
}
