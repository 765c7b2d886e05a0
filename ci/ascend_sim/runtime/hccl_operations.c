/* Operations of HCCL. Each is work on its stream, so it is asynchronous to the caller, as on the device.
 *
 * An operation is a list of messages that all move at once, plus local copies. Reductions send everything
 * to everyone and fold in the order of ranks, so that every rank gets the same bits; a device may use
 * another order and round differently. Buffers must be device memory. */
#include <stdlib.h>
#include <string.h>

#include "hccl.h"

static HcclResult misuse(const char *what) {
    sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: %s", what);
    return HCCL_E_PARA;
}

/* Replaces a device address by where its bytes are. */
static bool resolve(void **address, size_t size) {
    return size == 0 || sim_locate(*address, size, address) == SIM_DEVICE;
}

static struct message message_for(const struct hccl_job *job, bool sending, uint32_t peer, void *bytes, size_t size) {
    return (struct message){.sending = sending,
                            .peer = peer,
                            .operation = job->operation,
                            .type = job->type,
                            .bytes = bytes,
                            .size = size};
}

/* Sends `size` bytes at source + peer * step to each other rank; receives as many to destination +
 * peer * receive_step. */
static HcclResult swap_with_all(const struct hccl_job *job, char *source, size_t step, char *destination,
                                size_t receive_step, size_t size) {
    struct message messages[2 * SIM_MAX_RANKS];
    size_t count = 0;
    for (uint32_t peer = 0; peer < job->communicator->ranks; peer++) {
        if (peer == job->communicator->rank) {
            continue;
        }
        messages[count++] = message_for(job, true, peer, source + peer * step, size);
        messages[count++] = message_for(job, false, peer, destination + peer * receive_step, size);
    }
    return sim_exchange(job->communicator, messages, count);
}

/* From the root to all others: the same bytes (step 0), or each its part. */
static HcclResult spread(const struct hccl_job *job, char *source, size_t step, char *destination) {
    struct message messages[SIM_MAX_RANKS];
    size_t count = 0;
    if (job->communicator->rank != job->root) {
        messages[count++] = message_for(job, false, job->root, destination, job->size);
        return sim_exchange(job->communicator, messages, count);
    }
    for (uint32_t peer = 0; peer < job->communicator->ranks; peer++) {
        if (peer != job->root) {
            messages[count++] = message_for(job, true, peer, source + peer * step, job->size);
        }
    }
    return sim_exchange(job->communicator, messages, count);
}

static HcclResult scatter(const struct hccl_job *job, char *source, char *destination) {
    HcclResult result = spread(job, source, job->size, destination);
    if (result == HCCL_SUCCESS && job->communicator->rank == job->root) {
        memmove(destination, source + job->root * job->size, job->size);
    }
    return result;
}

static HcclResult all_gather(const struct hccl_job *job, char *source, char *destination) {
    memmove(destination + job->communicator->rank * job->size, source, job->size);
    return swap_with_all(job, source, 0, destination, job->size, job->size);
}

static HcclResult reduce(const struct hccl_job *job, const char *source, char *destination) {
    const struct communicator *communicator = job->communicator;
    const size_t whole = job->source_size;
    const size_t elements = whole / sim_hccl_type_size(job->type);
    char *all = sim_new(whole * communicator->ranks + 1);
    char *mine = all + communicator->rank * whole;
    memcpy(mine, source, whole);
    HcclResult result = swap_with_all(job, mine, 0, all, whole, whole);
    if (result == HCCL_SUCCESS) {
        for (uint32_t rank = 1; rank < communicator->ranks; rank++) {
            sim_reduce(all, all + rank * whole, elements, job->type, job->reduction);
        }
        if (job->operation == SIM_REDUCE_SCATTER) {
            memcpy(destination, all + communicator->rank * job->size, job->size);
        } else if (job->operation == SIM_ALL_REDUCE || communicator->rank == job->root) {
            memcpy(destination, all, job->size);
        }
    }
    free(all);
    return result;
}

static HcclResult exchange_list(struct hccl_job *job) {
    for (size_t i = 0; i < job->message_count; i++) {
        if (!resolve(&job->messages[i].bytes, job->messages[i].size)) {
            return misuse("a buffer is host memory, or leaves its device memory");
        }
    }
    if (job->own_size > 0) {
        memmove(job->own_destination, job->own_source, job->own_size);
    }
    return sim_exchange(job->communicator, job->messages, job->message_count);
}

static HcclResult barrier(const struct hccl_job *job) {
    char sent = 0;
    char received[SIM_MAX_RANKS];
    return swap_with_all(job, &sent, 0, received, 1, sizeof sent);
}

static HcclResult run_operation(struct hccl_job *job) {
    void *source = job->source;
    void *destination = job->destination;
    if (!resolve(&source, job->source_size) || !resolve(&destination, job->destination_size) ||
        !resolve(&job->own_source, job->own_size) || !resolve(&job->own_destination, job->own_size)) {
        return misuse("a buffer is host memory, or leaves its device memory");
    }
    switch (job->operation) {
    case SIM_POINT_TO_POINT:
    case SIM_ALL_TO_ALL:
        return exchange_list(job);
    case SIM_BROADCAST:
        return spread(job, source, 0, source);
    case SIM_SCATTER:
        return scatter(job, source, destination);
    case SIM_ALL_GATHER:
        return all_gather(job, source, destination);
    case SIM_ALL_REDUCE:
    case SIM_REDUCE:
    case SIM_REDUCE_SCATTER:
        return reduce(job, source, destination);
    case SIM_BARRIER:
        return barrier(job);
    }
    return misuse("no such operation");
}

/* ACL_SUCCESS, or why this communicator can do nothing any more, with the text in sim_message. */
static aclError check_usable(struct communicator *communicator) {
    pthread_mutex_lock(&communicator->lock);
    aclError error = communicator->error;
    if (error != ACL_SUCCESS) {
        sim_take_message(communicator->message);
    } else if (communicator->destroyed) {
        error = sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "hccl %s: destroyed with work in its queue",
                         communicator->name);
    }
    pthread_mutex_unlock(&communicator->lock);
    return error;
}

static aclError keep_failure(struct communicator *communicator, HcclResult result) {
    pthread_mutex_lock(&communicator->lock);
    communicator->error = ACL_ERROR_RT_INTERNAL_ERROR;
    communicator->result = result;
    memcpy(communicator->message, sim_message(), sizeof communicator->message);
    pthread_mutex_unlock(&communicator->lock);
    return ACL_ERROR_RT_INTERNAL_ERROR;
}

static aclError run_job(void *argument) {
    struct hccl_job *job = argument;
    aclError status = check_usable(job->communicator);
    if (status == ACL_SUCCESS) {
        HcclResult result = run_operation(job);
        if (result != HCCL_SUCCESS) {
            status = keep_failure(job->communicator, result);
        }
    }
    free(job->messages);
    sim_drop_communicator(job->communicator);
    return status;
}

HcclResult sim_start_job(const struct hccl_job *job, aclrtStream stream) {
    if (sim_record_captured(stream).capture != 0) {
        free(job->messages);
        return misuse("collectives in a graph are not simulated");
    }
    sim_use_communicator(job->communicator);
    if (sim_enqueue(stream, run_job, job, sizeof *job) == ACL_SUCCESS) {
        return HCCL_SUCCESS;
    }
    free(job->messages);
    sim_drop_communicator(job->communicator);
    return HCCL_E_RUNTIME;
}
