/* The functions of HCCL that start an operation: they check their arguments and describe it as a job. */
#include <stdlib.h>

#include "hccl.h"

static HcclResult check_call(HcclComm communicator, int type, uint32_t peer) {
    if (communicator == NULL) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: no communicator");
        return HCCL_E_PARA;
    }
    if (sim_hccl_type_size(type) == 0) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: no data type %d", type);
        return HCCL_E_PARA;
    }
    if (peer >= communicator->ranks) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: rank %u of %u", peer, communicator->ranks);
        return HCCL_E_PARA;
    }
    return HCCL_SUCCESS;
}

static HcclResult check_reduction(HcclComm communicator, int type, int reduction, uint32_t root) {
    HcclResult result = check_call(communicator, type, root);
    if (result == HCCL_SUCCESS && !sim_can_reduce(type, reduction)) {
        sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "hccl: no reduction %d of data type %d", reduction, type);
        return HCCL_E_NOT_SUPPORT;
    }
    return result;
}

/* A list of messages of one call of HcclSend, HcclRecv or HcclBatchSendRecv. */
static HcclResult start_point_to_point(const HcclSendRecvItem *items, uint32_t count, HcclComm communicator,
                                       aclrtStream stream) {
    for (uint32_t i = 0; i < count; i++) {
        HcclResult result = check_call(communicator, items[i].dtype, items[i].peer);
        if (result != HCCL_SUCCESS) {
            return result;
        }
        if (items[i].peer == communicator->rank) {
            sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: rank %u sends to itself", communicator->rank);
            return HCCL_E_PARA;
        }
    }
    struct hccl_job job = {.communicator = communicator, .operation = SIM_POINT_TO_POINT, .message_count = count};
    job.messages = sim_new(count * sizeof *job.messages + 1);
    for (uint32_t i = 0; i < count; i++) {
        job.messages[i] = (struct message){.sending = items[i].type == HCCL_SEND,
                                           .peer = items[i].peer,
                                           .operation = SIM_POINT_TO_POINT,
                                           .type = items[i].dtype,
                                           .bytes = items[i].buf,
                                           .size = items[i].count * sim_hccl_type_size(items[i].dtype)};
    }
    return sim_start_job(&job, stream);
}

SIM_API HcclResult HcclSend(void *buffer, uint64_t count, int type, uint32_t peer, HcclComm communicator,
                            aclrtStream stream) {
    const HcclSendRecvItem item = {HCCL_SEND, buffer, count, type, peer};
    return start_point_to_point(&item, 1, communicator, stream);
}

SIM_API HcclResult HcclRecv(void *buffer, uint64_t count, int type, uint32_t peer, HcclComm communicator,
                            aclrtStream stream) {
    const HcclSendRecvItem item = {HCCL_RECV, buffer, count, type, peer};
    return start_point_to_point(&item, 1, communicator, stream);
}

SIM_API HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm communicator,
                                     aclrtStream stream) {
    if (communicator == NULL || (items == NULL && count > 0)) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: no communicator, or no items");
        return HCCL_E_PARA;
    }
    return start_point_to_point(items, count, communicator, stream);
}

SIM_API HcclResult HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, HcclComm communicator,
                                 aclrtStream stream) {
    HcclResult result = check_call(communicator, type, root);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    const size_t size = count * sim_hccl_type_size(type);
    const struct hccl_job job = {.communicator = communicator,
                                 .operation = SIM_BROADCAST,
                                 .type = type,
                                 .root = root,
                                 .size = size,
                                 .source = buffer,
                                 .source_size = size};
    return sim_start_job(&job, stream);
}

SIM_API HcclResult HcclScatter(void *source, void *destination, uint64_t count, int type, uint32_t root,
                               HcclComm communicator, aclrtStream stream) {
    HcclResult result = check_call(communicator, type, root);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    const size_t size = count * sim_hccl_type_size(type);
    const struct hccl_job job = {.communicator = communicator,
                                 .operation = SIM_SCATTER,
                                 .type = type,
                                 .root = root,
                                 .size = size,
                                 .source = source,
                                 .source_size = communicator->rank == root ? size * communicator->ranks : 0,
                                 .destination = destination,
                                 .destination_size = size};
    return sim_start_job(&job, stream);
}

SIM_API HcclResult HcclAllGather(void *source, void *destination, uint64_t count, int type,
                                 HcclComm communicator, aclrtStream stream) {
    HcclResult result = check_call(communicator, type, 0);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    const size_t size = count * sim_hccl_type_size(type);
    const struct hccl_job job = {.communicator = communicator,
                                 .operation = SIM_ALL_GATHER,
                                 .type = type,
                                 .size = size,
                                 .source = source,
                                 .source_size = size,
                                 .destination = destination,
                                 .destination_size = size * communicator->ranks};
    return sim_start_job(&job, stream);
}

SIM_API HcclResult HcclAllReduce(void *source, void *destination, uint64_t count, int type, int reduction,
                                 HcclComm communicator, aclrtStream stream) {
    HcclResult result = check_reduction(communicator, type, reduction, 0);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    const size_t size = count * sim_hccl_type_size(type);
    const struct hccl_job job = {.communicator = communicator,
                                 .operation = SIM_ALL_REDUCE,
                                 .type = type,
                                 .reduction = reduction,
                                 .size = size,
                                 .source = source,
                                 .source_size = size,
                                 .destination = destination,
                                 .destination_size = size};
    return sim_start_job(&job, stream);
}

SIM_API HcclResult HcclReduce(void *source, void *destination, uint64_t count, int type, int reduction,
                              uint32_t root, HcclComm communicator, aclrtStream stream) {
    HcclResult result = check_reduction(communicator, type, reduction, root);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    const size_t size = count * sim_hccl_type_size(type);
    const struct hccl_job job = {.communicator = communicator,
                                 .operation = SIM_REDUCE,
                                 .type = type,
                                 .reduction = reduction,
                                 .root = root,
                                 .size = size,
                                 .source = source,
                                 .source_size = size,
                                 .destination = destination,
                                 .destination_size = communicator->rank == root ? size : 0};
    return sim_start_job(&job, stream);
}

SIM_API HcclResult HcclReduceScatter(void *source, void *destination, uint64_t count, int type, int reduction,
                                     HcclComm communicator, aclrtStream stream) {
    HcclResult result = check_reduction(communicator, type, reduction, 0);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    const size_t size = count * sim_hccl_type_size(type);
    const struct hccl_job job = {.communicator = communicator,
                                 .operation = SIM_REDUCE_SCATTER,
                                 .type = type,
                                 .reduction = reduction,
                                 .size = size,
                                 .source = source,
                                 .source_size = size * communicator->ranks,
                                 .destination = destination,
                                 .destination_size = size};
    return sim_start_job(&job, stream);
}

/* Counts and offsets are in elements, one per rank. */
SIM_API HcclResult HcclAlltoAllV(const void *source, const void *send_counts, const void *send_offsets,
                                 int send_type, const void *destination, const void *receive_counts,
                                 const void *receive_offsets, int receive_type, HcclComm communicator,
                                 aclrtStream stream) {
    const uint64_t *sends = send_counts;
    const uint64_t *send_starts = send_offsets;
    const uint64_t *receives = receive_counts;
    const uint64_t *receive_starts = receive_offsets;
    HcclResult result = check_call(communicator, send_type, 0);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    if (send_type != receive_type) {
        sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "hccl: all-to-all of types %d and %d", send_type, receive_type);
        return HCCL_E_NOT_SUPPORT;
    }
    if (sends[communicator->rank] != receives[communicator->rank]) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: rank %u keeps %lu elements of %lu", communicator->rank,
                 (unsigned long)receives[communicator->rank], (unsigned long)sends[communicator->rank]);
        return HCCL_E_PARA;
    }
    const size_t element = sim_hccl_type_size(send_type);
    struct hccl_job job = {.communicator = communicator, .operation = SIM_ALL_TO_ALL, .type = send_type};
    job.messages = sim_new(2 * communicator->ranks * sizeof *job.messages);
    for (uint32_t peer = 0; peer < communicator->ranks; peer++) {
        char *from = (char *)source + send_starts[peer] * element;
        char *into = (char *)destination + receive_starts[peer] * element;
        struct message message = {.peer = peer, .operation = SIM_ALL_TO_ALL, .type = send_type};
        if (peer == communicator->rank) {
            job.own_source = from;
            job.own_destination = into;
            job.own_size = sends[peer] * element;
            continue;
        }
        message.sending = true;
        message.bytes = from;
        message.size = sends[peer] * element;
        job.messages[job.message_count++] = message;
        message.sending = false;
        message.bytes = into;
        message.size = receives[peer] * element;
        job.messages[job.message_count++] = message;
    }
    return sim_start_job(&job, stream);
}

SIM_API HcclResult HcclAlltoAll(const void *source, uint64_t send_count, int send_type, const void *destination,
                                uint64_t receive_count, int receive_type, HcclComm communicator,
                                aclrtStream stream) {
    uint64_t sends[SIM_MAX_RANKS];
    uint64_t send_starts[SIM_MAX_RANKS];
    uint64_t receives[SIM_MAX_RANKS];
    uint64_t receive_starts[SIM_MAX_RANKS];
    HcclResult result = check_call(communicator, send_type, 0);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    for (uint32_t peer = 0; peer < communicator->ranks; peer++) {
        sends[peer] = send_count;
        send_starts[peer] = peer * send_count;
        receives[peer] = receive_count;
        receive_starts[peer] = peer * receive_count;
    }
    return HcclAlltoAllV(source, sends, send_starts, send_type, destination, receives, receive_starts,
                         receive_type, communicator, stream);
}

SIM_API HcclResult HcclBarrier(HcclComm communicator, aclrtStream stream) {
    HcclResult result = check_call(communicator, HCCL_UINT8, 0);
    if (result != HCCL_SUCCESS) {
        return result;
    }
    const struct hccl_job job = {.communicator = communicator, .operation = SIM_BARRIER, .type = HCCL_UINT8};
    return sim_start_job(&job, stream);
}
