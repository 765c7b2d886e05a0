/* destination <- source for tensors: broadcasting, strides, casts. What all simulated operators are made of. */
#include <string.h>

#include "aclnn.h"
#include "numbers.h"

static bool is_integer(int type) {
    switch (type) {
    case ACL_FLOAT:
    case ACL_DOUBLE:
    case ACL_FLOAT16:
    case ACL_BF16:
        return false;
    default:
        return true;
    }
}

/* Both forms of the value, the exact one among them. False: a type that is not simulated. */
static bool load(int type, const void *from, aclScalar *value) {
    switch (type) {
    case ACL_FLOAT:
        value->real = *(const float *)from;
        break;
    case ACL_DOUBLE:
        value->real = *(const double *)from;
        break;
    case ACL_FLOAT16:
        value->real = (double)*(const _Float16 *)from;
        break;
    case ACL_BF16:
        value->real = bfloat16_to_float(*(const uint16_t *)from);
        break;
    case ACL_INT8:
        value->integer = *(const int8_t *)from;
        break;
    case ACL_UINT8:
        value->integer = *(const uint8_t *)from;
        break;
    case ACL_BOOL:
        value->integer = *(const uint8_t *)from != 0;
        break;
    case ACL_INT16:
        value->integer = *(const int16_t *)from;
        break;
    case ACL_INT32:
        value->integer = *(const int32_t *)from;
        break;
    case ACL_INT64:
        value->integer = *(const int64_t *)from;
        break;
    default:
        return false;
    }
    if (is_integer(type)) {
        value->real = (double)value->integer;
    } else {
        value->integer = sim_to_integer(value->real);
    }
    return true;
}

static bool store(int type, void *to, const aclScalar *value) {
    switch (type) {
    case ACL_FLOAT:
        *(float *)to = (float)value->real;
        return true;
    case ACL_DOUBLE:
        *(double *)to = value->real;
        return true;
    case ACL_FLOAT16:
        *(_Float16 *)to = (_Float16)value->real;
        return true;
    case ACL_BF16:
        *(uint16_t *)to = float_to_bfloat16((float)value->real);
        return true;
    case ACL_INT8:
    case ACL_UINT8:
        *(uint8_t *)to = (uint8_t)value->integer;
        return true;
    case ACL_BOOL:
        *(uint8_t *)to = value->real != 0 || value->integer != 0;
        return true;
    case ACL_INT16:
        *(int16_t *)to = (int16_t)value->integer;
        return true;
    case ACL_INT32:
        *(int32_t *)to = (int32_t)value->integer;
        return true;
    case ACL_INT64:
        *(int64_t *)to = value->integer;
        return true;
    default:
        return false;
    }
}

/* One assignment on its way through the dimensions. Strides are in elements; 0 repeats an element. */
struct assignment {
    const aclTensor *destination;
    int source_type;
    int64_t source_stride[SIM_MAX_DIMENSIONS];
    size_t destination_element;
    size_t source_element;
};

static bool is_plain_row(const struct assignment *assignment, int dimension) {
    return dimension == assignment->destination->dimensions - 1 &&
           assignment->destination->type == assignment->source_type &&
           assignment->destination->stride[dimension] == 1 && assignment->source_stride[dimension] == 1;
}

static bool assign_from(const struct assignment *assignment, int dimension, char *to, const char *from) {
    const aclTensor *destination = assignment->destination;
    aclScalar value;
    if (dimension == destination->dimensions) {
        if (destination->type == assignment->source_type) {
            memcpy(to, from, assignment->destination_element);
            return true;
        }
        return load(assignment->source_type, from, &value) && store(destination->type, to, &value);
    }
    const int64_t size = destination->shape[dimension];
    if (is_plain_row(assignment, dimension)) {
        memmove(to, from, (size_t)size * assignment->destination_element);
        return true;
    }
    const int64_t to_step = destination->stride[dimension] * (int64_t)assignment->destination_element;
    const int64_t from_step = assignment->source_stride[dimension] * (int64_t)assignment->source_element;
    for (int64_t i = 0; i < size; i++) {
        if (!assign_from(assignment, dimension + 1, to + i * to_step, from + i * from_step)) {
            return false;
        }
    }
    return true;
}

/* The source's strides in the destination's dimensions. False: the shapes do not broadcast. */
static bool broadcast(const aclTensor *source, const aclTensor *destination, int64_t *stride) {
    memset(stride, 0, SIM_MAX_DIMENSIONS * sizeof *stride);
    for (int i = 0; i < source->dimensions; i++) {
        const int to = destination->dimensions - source->dimensions + i;
        if (source->shape[i] == 1) {
            continue;
        }
        if (to < 0 || source->shape[i] != destination->shape[to]) {
            return false;
        }
        stride[to] = source->stride[i];
    }
    return true;
}

static aclError bytes_of(const aclTensor *tensor, void **bytes) {
    if (sim_locate(tensor->data, tensor->span, bytes) != SIM_DEVICE) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclnn: %zu bytes of a tensor at %p are not device memory",
                        tensor->span, (const void *)tensor->data);
    }
    return ACL_SUCCESS;
}

static aclError refuse_cast(int from, int to) {
    return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclnn: cast of type %d to %d is not simulated", from, to);
}

aclError sim_assign(const aclTensor *destination, const aclTensor *source) {
    struct assignment assignment = {.destination = destination,
                                    .source_type = source->type,
                                    .destination_element = sim_element_size(destination->type),
                                    .source_element = sim_element_size(source->type)};
    void *to;
    void *from;
    if (!broadcast(source, destination, assignment.source_stride)) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclnn: the source's shape does not broadcast");
    }
    if (destination->span == 0) {
        return ACL_SUCCESS;
    }
    aclError status = bytes_of(destination, &to);
    if (status == ACL_SUCCESS) {
        status = bytes_of(source, &from);
    }
    if (status != ACL_SUCCESS) {
        return status;
    }
    return assign_from(&assignment, 0, to, from) ? ACL_SUCCESS : refuse_cast(source->type, destination->type);
}

static bool fill_from(const aclTensor *destination, int dimension, char *to, const aclScalar *value) {
    if (dimension == destination->dimensions) {
        return store(destination->type, to, value);
    }
    const int64_t step = destination->stride[dimension] * (int64_t)sim_element_size(destination->type);
    for (int64_t i = 0; i < destination->shape[dimension]; i++) {
        if (!fill_from(destination, dimension + 1, to + i * step, value)) {
            return false;
        }
    }
    return true;
}

aclError sim_fill(const aclTensor *destination, const aclScalar *value) {
    void *to;
    if (destination->span == 0) {
        return ACL_SUCCESS;
    }
    aclError status = bytes_of(destination, &to);
    if (status != ACL_SUCCESS) {
        return status;
    }
    return fill_from(destination, 0, to, value) ? ACL_SUCCESS : refuse_cast(ACL_DT_UNDEFINED, destination->type);
}

aclError sim_read_integers(const aclTensor *source, int64_t *values) {
    void *bytes;
    aclScalar value;
    if (source->span == 0) {
        return ACL_SUCCESS;
    }
    aclError status = bytes_of(source, &bytes);
    if (status != ACL_SUCCESS) {
        return status;
    }
    const int64_t step = source->stride[0] * (int64_t)sim_element_size(source->type);
    for (int64_t i = 0; i < source->shape[0]; i++) {
        if (!is_integer(source->type) || !load(source->type, (char *)bytes + i * step, &value)) {
            return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclnn: index of type %d", source->type);
        }
        values[i] = value.integer;
    }
    return ACL_SUCCESS;
}
