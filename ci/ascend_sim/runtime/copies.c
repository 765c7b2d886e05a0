/* Copies and fills. They check what a device would fault on or corrupt silently: room, direction, ends of
 * allocations, freed memory.
 *
 * ASCEND_SIM_COPY_US makes each copy last, to show a missing wait: it reads its source after half of the
 * time and writes its destination at the end. Who reads the destination without waiting, even by another
 * copy, gets the old bytes; who overwrites the source at once changes what is copied. Not simulated: that
 * copies between devices need aclrtDeviceEnablePeerAccess, and that a stream belongs to one device. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ascend_sim.h"

struct copy {
    void *destination;
    const void *source;
    size_t size;
};

struct fill {
    void *destination;
    int value;
    size_t size;
};

static aclError refuse_freed(const struct copy *copy) {
    return sim_fail(ACL_ERROR_RT_DEVICE_MEM_ERROR, "copy %p <- %p, %zu bytes: freed device memory",
                    copy->destination, copy->source, copy->size);
}

static aclError run_slowly(const struct copy *copy, useconds_t delay_us) {
    void *to;
    void *from;
    usleep(delay_us / 2);
    if (sim_locate(copy->source, copy->size, &from) == SIM_NOWHERE) {
        return refuse_freed(copy);
    }
    void *between = sim_new(copy->size + 1);
    memcpy(between, from, copy->size);
    usleep(delay_us / 2);
    bool exists = sim_locate(copy->destination, copy->size, &to) != SIM_NOWHERE;
    if (exists) {
        memcpy(to, between, copy->size);
    }
    free(between);
    return exists ? ACL_SUCCESS : refuse_freed(copy);
}

static aclError run_copy(void *argument) {
    const struct copy *copy = argument;
    void *to;
    void *from;
    const long delay_us = sim_setting("ASCEND_SIM_COPY_US", 0);
    if (delay_us > 0) {
        return run_slowly(copy, (useconds_t)delay_us);
    }
    if (sim_locate(copy->destination, copy->size, &to) == SIM_NOWHERE ||
        sim_locate(copy->source, copy->size, &from) == SIM_NOWHERE) {
        return refuse_freed(copy);
    }
    memmove(to, from, copy->size);
    return ACL_SUCCESS;
}

static bool writes_device(aclrtMemcpyKind kind) {
    return kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE ||
           kind == ACL_MEMCPY_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_INNER_DEVICE_TO_DEVICE ||
           kind == ACL_MEMCPY_INTER_DEVICE_TO_DEVICE;
}

static bool reads_device(aclrtMemcpyKind kind) {
    return kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE ||
           kind == ACL_MEMCPY_INNER_DEVICE_TO_DEVICE || kind == ACL_MEMCPY_INTER_DEVICE_TO_DEVICE;
}

static const char *place_name(enum sim_place place) {
    return place == SIM_DEVICE ? "device" : "host";
}

static aclError check_copy(const struct copy *copy, size_t room, aclrtMemcpyKind kind) {
    void *bytes;
    if (copy->size > room) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "copy of %zu bytes into %zu", copy->size, room);
    }
    const enum sim_place to = sim_locate(copy->destination, copy->size, &bytes);
    const enum sim_place from = sim_locate(copy->source, copy->size, &bytes);
    if (to == SIM_NOWHERE || from == SIM_NOWHERE) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "copy %p <- %p, %zu bytes: outside of allocated device memory",
                        copy->destination, copy->source, copy->size);
    }
    if (kind != ACL_MEMCPY_DEFAULT &&
        (writes_device(kind) != (to == SIM_DEVICE) || reads_device(kind) != (from == SIM_DEVICE))) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "copy of kind %d from %s to %s memory", kind,
                        place_name(from), place_name(to));
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMemcpy(void *destination, size_t room, const void *source, size_t size,
                             aclrtMemcpyKind kind) {
    struct copy copy = {.destination = destination, .source = source, .size = size};
    aclError status = check_copy(&copy, room, kind);
    if (status == ACL_SUCCESS) {
        status = sim_refuse_blocking("a synchronous copy");
    }
    return status == ACL_SUCCESS ? run_copy(&copy) : status;
}

static bool is_pageable(const void *address) {
    void *bytes;
    return sim_locate(address, 1, &bytes) == SIM_HOST && !sim_is_pinned(address);
}

/* As in CANN, a copy from or to host memory that is not pinned is done when the call returns. */
SIM_API aclError aclrtMemcpyAsync(void *destination, size_t room, const void *source, size_t size,
                                  aclrtMemcpyKind kind, aclrtStream stream) {
    const struct copy copy = {.destination = destination, .source = source, .size = size};
    const bool blocks = is_pageable(source) || is_pageable(destination);
    aclError status = check_copy(&copy, room, kind);
    if (status == ACL_SUCCESS && blocks) {
        status = sim_refuse_blocking("a copy of pageable memory");
    }
    if (status == ACL_SUCCESS) {
        status = sim_enqueue(stream, run_copy, &copy, sizeof copy);
    }
    if (status == ACL_SUCCESS && blocks) {
        status = sim_synchronize(stream, SIM_FOREVER_MS);
    }
    return status;
}

SIM_API aclError aclrtMemcpyAsyncWithCondition(void *destination, size_t room, const void *source, size_t size,
                                               aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpyAsync(destination, room, source, size, kind, stream);
}

/* The attributes say where the memory is, which the runtime knows by itself. */
SIM_API aclError aclrtMemcpyBatch(void **destinations, size_t *rooms, void **sources, size_t *sizes,
                                  size_t count, UNUSED aclrtMemcpyBatchAttr *attributes,
                                  UNUSED size_t *attribute_indices, UNUSED size_t attribute_count,
                                  size_t *failed) {
    for (size_t i = 0; i < count; i++) {
        aclError status = aclrtMemcpy(destinations[i], rooms[i], sources[i], sizes[i], ACL_MEMCPY_DEFAULT);
        if (status != ACL_SUCCESS) {
            *failed = i;
            return status;
        }
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMemcpyBatchAsync(void **destinations, size_t *rooms, void **sources, size_t *sizes,
                                       size_t count, UNUSED aclrtMemcpyBatchAttr *attributes,
                                       UNUSED size_t *attribute_indices, UNUSED size_t attribute_count,
                                       size_t *failed, aclrtStream stream) {
    for (size_t i = 0; i < count; i++) {
        aclError status =
            aclrtMemcpyAsync(destinations[i], rooms[i], sources[i], sizes[i], ACL_MEMCPY_DEFAULT, stream);
        if (status != ACL_SUCCESS) {
            *failed = i;
            return status;
        }
    }
    return ACL_SUCCESS;
}

static aclError run_fill(void *argument) {
    const struct fill *fill = argument;
    void *bytes;
    if (sim_locate(fill->destination, fill->size, &bytes) == SIM_NOWHERE) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "fill %p, %zu bytes: outside of allocated device memory",
                        fill->destination, fill->size);
    }
    memset(bytes, fill->value, fill->size);
    return ACL_SUCCESS;
}

static aclError check_fill(const struct fill *fill, size_t room) {
    if (fill->size > room) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "fill of %zu bytes in %zu", fill->size, room);
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMemset(void *destination, size_t room, int32_t value, size_t size) {
    struct fill fill = {.destination = destination, .value = value, .size = size};
    aclError status = check_fill(&fill, room);
    if (status == ACL_SUCCESS) {
        status = sim_refuse_blocking("a synchronous fill");
    }
    return status == ACL_SUCCESS ? run_fill(&fill) : status;
}

SIM_API aclError aclrtMemsetAsync(void *destination, size_t room, int32_t value, size_t size,
                                  aclrtStream stream) {
    const struct fill fill = {.destination = destination, .value = value, .size = size};
    aclError status = check_fill(&fill, room);
    return status == ACL_SUCCESS ? sim_enqueue(stream, run_fill, &fill, sizeof fill) : status;
}
