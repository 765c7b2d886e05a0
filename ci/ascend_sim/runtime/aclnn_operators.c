/* The operators that torch_npu calls by itself, below PyTorch's dispatcher, where a double cannot stand in:
 * copies with strides and casts, fills, cat, index_select, pad.
 *
 * An operator has two functions, as in CANN: ...GetWorkspaceSize checks and keeps the arguments, the
 * second one puts the work on a stream. No operator needs a workspace here. */
#include <stdlib.h>

#include "aclnn.h"

/* A call between its two functions. */
typedef struct aclOpExecutor {
    aclError (*run)(const struct aclOpExecutor *call);
    aclTensor destination;
    aclTensor source;
    aclTensor index;
    aclScalar value;
    int64_t dimension;
    int64_t before[SIM_MAX_DIMENSIONS]; /* padding */
    uint64_t parts_count;
    aclTensor parts[]; /* of cat */
} aclOpExecutor;

typedef aclError (*runner)(const aclOpExecutor *call);

static aclOpExecutor *new_call(runner run, const aclTensor *destination, uint64_t parts_count,
                               uint64_t *workspace, aclOpExecutor **out) {
    aclOpExecutor *call = sim_new(sizeof *call + parts_count * sizeof call->parts[0]);
    call->run = run;
    call->destination = *destination;
    call->parts_count = parts_count;
    *workspace = 0;
    *out = call;
    return call;
}

static aclError run_on_stream(void *argument) {
    const aclOpExecutor *call = argument;
    return call->run(call);
}

static int enqueue(aclOpExecutor *call, aclrtStream stream) {
    const size_t size = sizeof *call + call->parts_count * sizeof call->parts[0];
    aclError status = sim_enqueue(stream, run_on_stream, call, size);
    free(call);
    return status;
}

static int64_t from_front(int64_t dimension, const aclTensor *tensor) {
    return dimension < 0 ? dimension + tensor->dimensions : dimension;
}

static aclError check_dimension(int64_t dimension, const aclTensor *tensor) {
    if (dimension < 0 || dimension >= tensor->dimensions) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclnn: dimension %ld of %d", (long)dimension, tensor->dimensions);
    }
    return ACL_SUCCESS;
}

/* ---- copy and cast */
static aclError run_copy(const aclOpExecutor *call) {
    return sim_assign(&call->destination, &call->source);
}

SIM_API int aclnnInplaceCopyGetWorkspaceSize(const aclTensor *destination, const aclTensor *source,
                                             uint64_t *workspace, aclOpExecutor **out) {
    new_call(run_copy, destination, 0, workspace, out)->source = *source;
    return ACL_SUCCESS;
}

SIM_API int aclnnInplaceCopy(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call,
                             aclrtStream stream) {
    return enqueue(call, stream);
}

SIM_API int aclnnCastGetWorkspaceSize(const aclTensor *source, UNUSED int type, const aclTensor *destination,
                                      uint64_t *workspace, aclOpExecutor **out) {
    return aclnnInplaceCopyGetWorkspaceSize(destination, source, workspace, out);
}

SIM_API int aclnnCast(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call, aclrtStream stream) {
    return enqueue(call, stream);
}

/* ---- fills */
static aclError run_fill(const aclOpExecutor *call) {
    return sim_fill(&call->destination, &call->value);
}

SIM_API int aclnnInplaceZeroGetWorkspaceSize(const aclTensor *destination, uint64_t *workspace,
                                             aclOpExecutor **out) {
    new_call(run_fill, destination, 0, workspace, out);
    return ACL_SUCCESS;
}

SIM_API int aclnnInplaceZero(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call,
                             aclrtStream stream) {
    return enqueue(call, stream);
}

SIM_API int aclnnInplaceOneGetWorkspaceSize(const aclTensor *destination, uint64_t *workspace,
                                            aclOpExecutor **out) {
    new_call(run_fill, destination, 0, workspace, out)->value = (aclScalar){.real = 1, .integer = 1};
    return ACL_SUCCESS;
}

SIM_API int aclnnInplaceOne(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call,
                            aclrtStream stream) {
    return enqueue(call, stream);
}

SIM_API int aclnnInplaceFillScalarGetWorkspaceSize(const aclTensor *destination, const aclScalar *value,
                                                   uint64_t *workspace, aclOpExecutor **out) {
    if (value == NULL) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclnnInplaceFillScalar: no value");
    }
    new_call(run_fill, destination, 0, workspace, out)->value = *value;
    return ACL_SUCCESS;
}

SIM_API int aclnnInplaceFillScalar(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call,
                                   aclrtStream stream) {
    return enqueue(call, stream);
}

/* ---- cat */
static bool is_placeholder(const aclTensor *tensor) { /* PyTorch lets an empty vector join any shape */
    return tensor->dimensions == 1 && tensor->shape[0] == 0;
}

static aclError run_cat(const aclOpExecutor *call) {
    int64_t start = 0;
    for (uint64_t i = 0; i < call->parts_count; i++) {
        const aclTensor *part = &call->parts[i];
        if (is_placeholder(part)) {
            continue;
        }
        const int64_t size = part->shape[call->dimension];
        const aclTensor room = sim_narrow(&call->destination, call->dimension, start, size);
        aclError status = sim_assign(&room, part);
        if (status != ACL_SUCCESS) {
            return status;
        }
        start += size;
    }
    return ACL_SUCCESS;
}

SIM_API int aclnnCatGetWorkspaceSize(const aclTensorList *list, int64_t dimension, const aclTensor *destination,
                                     uint64_t *workspace, aclOpExecutor **out) {
    dimension = from_front(dimension, destination);
    aclError status = check_dimension(dimension, destination);
    if (status != ACL_SUCCESS) {
        return status;
    }
    aclOpExecutor *call = new_call(run_cat, destination, list->size, workspace, out);
    call->dimension = dimension;
    for (uint64_t i = 0; i < list->size; i++) {
        call->parts[i] = *list->tensors[i];
    }
    return ACL_SUCCESS;
}

SIM_API int aclnnCat(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call, aclrtStream stream) {
    return enqueue(call, stream);
}

/* ---- index_select */
static aclError copy_selected(const aclOpExecutor *call, int64_t row, int64_t index) {
    const int64_t rows = call->source.shape[call->dimension];
    if (index < 0) {
        index += rows;
    }
    if (index < 0 || index >= rows) {
        return sim_fail(ACL_ERROR_RT_AICORE_EXCEPTION, "index_select: index %ld of %ld rows", (long)index,
                        (long)rows);
    }
    const aclTensor to = sim_narrow(&call->destination, call->dimension, row, 1);
    const aclTensor from = sim_narrow(&call->source, call->dimension, index, 1);
    return sim_assign(&to, &from);
}

static aclError run_index_select(const aclOpExecutor *call) {
    const int64_t rows = call->destination.shape[call->dimension];
    if (call->index.dimensions != 1 || call->index.shape[0] != rows) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "index_select: the index is not a vector of %ld", (long)rows);
    }
    int64_t *indices = sim_new((size_t)rows * sizeof *indices + 1);
    aclError status = sim_read_integers(&call->index, indices);
    for (int64_t row = 0; status == ACL_SUCCESS && row < rows; row++) {
        status = copy_selected(call, row, indices[row]);
    }
    free(indices);
    return status;
}

SIM_API int aclnnIndexSelectGetWorkspaceSize(const aclTensor *source, int64_t dimension, const aclTensor *index,
                                             const aclTensor *destination, uint64_t *workspace,
                                             aclOpExecutor **out) {
    dimension = from_front(dimension, destination);
    aclError status = check_dimension(dimension, destination);
    if (status != ACL_SUCCESS) {
        return status;
    }
    aclOpExecutor *call = new_call(run_index_select, destination, 0, workspace, out);
    call->source = *source;
    call->index = *index;
    call->dimension = dimension;
    return ACL_SUCCESS;
}

SIM_API int aclnnIndexSelect(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call,
                             aclrtStream stream) {
    return enqueue(call, stream);
}

/* ---- pad with a constant */
static aclError run_pad(const aclOpExecutor *call) {
    aclError status = sim_fill(&call->destination, &call->value);
    aclTensor middle = call->destination;
    for (int i = 0; i < middle.dimensions; i++) {
        middle = sim_narrow(&middle, i, call->before[i], call->source.shape[i]);
    }
    return status == ACL_SUCCESS ? sim_assign(&middle, &call->source) : status;
}

/* padding: before and after, for the last dimension first. A negative one, which cuts, is not simulated. */
SIM_API int aclnnConstantPadNdGetWorkspaceSize(const aclTensor *source, const aclIntArray *padding,
                                               const aclScalar *value, const aclTensor *destination,
                                               uint64_t *workspace, aclOpExecutor **out) {
    for (uint64_t i = 0; i < padding->size; i++) {
        if (padding->values[i] < 0 || i / 2 >= (uint64_t)source->dimensions) {
            return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "pad: %ld at place %lu is not simulated",
                            (long)padding->values[i], (unsigned long)i);
        }
    }
    if (value == NULL) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclnnConstantPadNd: no value");
    }
    aclOpExecutor *call = new_call(run_pad, destination, 0, workspace, out);
    call->source = *source;
    call->value = *value;
    for (uint64_t i = 0; i + 1 < padding->size; i += 2) {
        call->before[(uint64_t)source->dimensions - 1 - i / 2] = padding->values[i];
    }
    return ACL_SUCCESS;
}

SIM_API int aclnnConstantPadNd(UNUSED void *workspace, UNUSED uint64_t size, aclOpExecutor *call,
                               aclrtStream stream) {
    return enqueue(call, stream);
}
