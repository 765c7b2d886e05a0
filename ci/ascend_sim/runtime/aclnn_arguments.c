/* Arguments of operators: tensors, scalars and lists of them. */
#include <stdlib.h>
#include <string.h>

#include "aclnn.h"

size_t sim_element_size(int type) {
    switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0:
        return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
        return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32:
        return 4;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64:
        return 8;
    case ACL_COMPLEX128:
        return 16;
    default:
        return 0;
    }
}

static size_t span_of(const aclTensor *tensor) {
    const size_t element = sim_element_size(tensor->type);
    size_t span = element;
    for (int i = 0; i < tensor->dimensions; i++) {
        if (tensor->shape[i] == 0) {
            return 0;
        }
        span += (size_t)((tensor->shape[i] - 1) * tensor->stride[i]) * element;
    }
    return span;
}

aclTensor sim_narrow(const aclTensor *tensor, int64_t dimension, int64_t start, int64_t size) {
    aclTensor part = *tensor;
    part.data += start * part.stride[dimension] * (int64_t)sim_element_size(part.type);
    part.shape[dimension] = size;
    part.span = span_of(&part);
    return part;
}

/* The storage's own shape does not matter here: memory is checked against its allocation. */
SIM_API aclTensor *aclCreateTensor(const int64_t *shape, uint64_t dimensions, int type, const int64_t *stride,
                                   int64_t offset, UNUSED int format, UNUSED const int64_t *storage_shape,
                                   UNUSED uint64_t storage_dimensions, void *data) {
    if (dimensions > SIM_MAX_DIMENSIONS) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "tensor of %lu dimensions (at most %d)", (unsigned long)dimensions,
                 SIM_MAX_DIMENSIONS);
        return NULL;
    }
    aclTensor *tensor = sim_new(sizeof *tensor);
    tensor->type = type;
    tensor->dimensions = (int)dimensions;
    for (uint64_t i = 0; i < dimensions; i++) {
        tensor->shape[i] = shape[i];
        tensor->stride[i] = stride[i];
    }
    tensor->span = span_of(tensor);
    if (data != NULL) {
        tensor->data = (char *)data + offset * (int64_t)sim_element_size(type);
    }
    return tensor;
}

SIM_API int aclDestroyTensor(const aclTensor *tensor) {
    free((void *)tensor);
    return ACL_SUCCESS;
}

SIM_API aclTensorList *aclCreateTensorList(aclTensor *const *tensors, uint64_t size) {
    aclTensorList *list = sim_new(sizeof *list + size * sizeof *tensors);
    list->size = size;
    memcpy(list->tensors, tensors, size * sizeof *tensors);
    return list;
}

/* The tensors go with their list. */
SIM_API int aclDestroyTensorList(const aclTensorList *list) {
    for (uint64_t i = 0; i < list->size; i++) {
        free(list->tensors[i]);
    }
    free((void *)list);
    return ACL_SUCCESS;
}

SIM_API aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t size) {
    aclIntArray *array = sim_new(sizeof *array + size * sizeof *values);
    array->size = size;
    memcpy(array->values, values, size * sizeof *values);
    return array;
}

SIM_API int aclDestroyIntArray(const aclIntArray *array) {
    free((void *)array);
    return ACL_SUCCESS;
}

int64_t sim_to_integer(double value) {
    const double limit = 9.2e18; /* below 2 to the 63 */
    return value > -limit && value < limit ? (int64_t)value : INT64_MIN;
}

static aclScalar real_scalar(double value) {
    return (aclScalar){.real = value, .integer = sim_to_integer(value)};
}

static aclScalar integer_scalar(int64_t value) {
    return (aclScalar){.real = (double)value, .integer = value};
}

/* NULL, with the reason as the last error, for a type that is not simulated. */
SIM_API aclScalar *aclCreateScalar(void *value, int type) {
    aclScalar scalar;
    switch (type) {
    case ACL_FLOAT:
        scalar = real_scalar(*(float *)value);
        break;
    case ACL_DOUBLE:
        scalar = real_scalar(*(double *)value);
        break;
    case ACL_INT64:
        scalar = integer_scalar(*(int64_t *)value);
        break;
    case ACL_INT32:
        scalar = integer_scalar(*(int32_t *)value);
        break;
    case ACL_BOOL:
        scalar = integer_scalar(*(uint8_t *)value != 0);
        break;
    default:
        sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "scalar of type %d is not simulated", type);
        return NULL;
    }
    aclScalar *copy = sim_new(sizeof *copy);
    *copy = scalar;
    return copy;
}

SIM_API int aclDestroyScalar(const aclScalar *scalar) {
    free((void *)scalar);
    return ACL_SUCCESS;
}
