/* Types of HCCL, and reductions of two arrays. */
#include "hccl.h"
#include "numbers.h"

size_t sim_hccl_type_size(int type) {
    switch (type) {
    case HCCL_INT8:
    case HCCL_UINT8:
    case HCCL_HIF8:
    case HCCL_FP8E4M3:
    case HCCL_FP8E5M2:
    case HCCL_FP8E8M0:
        return 1;
    case HCCL_INT16:
    case HCCL_UINT16:
    case HCCL_FP16:
    case HCCL_BFP16:
        return 2;
    case HCCL_INT32:
    case HCCL_UINT32:
    case HCCL_FP32:
        return 4;
    case HCCL_INT64:
    case HCCL_UINT64:
    case HCCL_FP64:
        return 8;
    case HCCL_INT128:
        return 16;
    default:
        return 0;
    }
}

/* A function that reduces arrays of one type, in that type's own arithmetic. */
#define DEFINE_REDUCE(NAME, TYPE)                                                                          \
    static void NAME(TYPE *into, const TYPE *from, size_t count, int operation) {                          \
        for (size_t i = 0; i < count; i++) {                                                               \
            switch (operation) {                                                                           \
            case HCCL_REDUCE_SUM:                                                                          \
                into[i] = (TYPE)(into[i] + from[i]);                                                       \
                break;                                                                                     \
            case HCCL_REDUCE_PROD:                                                                         \
                into[i] = (TYPE)(into[i] * from[i]);                                                       \
                break;                                                                                     \
            case HCCL_REDUCE_MAX:                                                                          \
                into[i] = into[i] > from[i] ? into[i] : from[i];                                           \
                break;                                                                                     \
            case HCCL_REDUCE_MIN:                                                                          \
                into[i] = into[i] < from[i] ? into[i] : from[i];                                           \
                break;                                                                                     \
            }                                                                                              \
        }                                                                                                  \
    }

DEFINE_REDUCE(reduce_int8, int8_t)
DEFINE_REDUCE(reduce_uint8, uint8_t)
DEFINE_REDUCE(reduce_int16, int16_t)
DEFINE_REDUCE(reduce_int32, int32_t)
DEFINE_REDUCE(reduce_int64, int64_t)
DEFINE_REDUCE(reduce_half, _Float16)
DEFINE_REDUCE(reduce_float, float)
DEFINE_REDUCE(reduce_double, double)

static void reduce_bfloat16(uint16_t *into, const uint16_t *from, size_t count, int operation) {
    for (size_t i = 0; i < count; i++) {
        float value = bfloat16_to_float(into[i]);
        const float other = bfloat16_to_float(from[i]);
        reduce_float(&value, &other, 1, operation);
        into[i] = float_to_bfloat16(value);
    }
}

bool sim_can_reduce(int type, int operation) {
    if (operation < HCCL_REDUCE_SUM || operation > HCCL_REDUCE_MIN) {
        return false;
    }
    switch (type) {
    case HCCL_INT8:
    case HCCL_UINT8:
    case HCCL_INT16:
    case HCCL_INT32:
    case HCCL_INT64:
    case HCCL_FP16:
    case HCCL_FP32:
    case HCCL_FP64:
    case HCCL_BFP16:
        return true;
    default:
        return false;
    }
}

/* into[i] = into[i] (operation) from[i], for what sim_can_reduce accepts. */
void sim_reduce(void *into, const void *from, size_t count, int type, int operation) {
    switch (type) {
    case HCCL_INT8:
        reduce_int8(into, from, count, operation);
        break;
    case HCCL_UINT8:
        reduce_uint8(into, from, count, operation);
        break;
    case HCCL_INT16:
        reduce_int16(into, from, count, operation);
        break;
    case HCCL_INT32:
        reduce_int32(into, from, count, operation);
        break;
    case HCCL_INT64:
        reduce_int64(into, from, count, operation);
        break;
    case HCCL_FP16:
        reduce_half(into, from, count, operation);
        break;
    case HCCL_FP32:
        reduce_float(into, from, count, operation);
        break;
    case HCCL_FP64:
        reduce_double(into, from, count, operation);
        break;
    case HCCL_BFP16:
        reduce_bfloat16(into, from, count, operation);
        break;
    }
}
