/* Operators of libopapi: what their arguments are. torch_npu's headers leave these types open; the
 * signatures follow the function types that torch_npu casts their addresses to, and CANN's documentation. */
#ifndef ASCEND_SIM_ACLNN_H
#define ASCEND_SIM_ACLNN_H

#include "ascend_sim.h"

enum { SIM_MAX_DIMENSIONS = 25 };

typedef struct aclTensor {
    int type; /* aclDataType */
    int dimensions;
    int64_t shape[SIM_MAX_DIMENSIONS];
    int64_t stride[SIM_MAX_DIMENSIONS]; /* in elements */
    char *data;                         /* device address of the first element */
    size_t span;                        /* bytes from the first to after the last element; 0: no elements */
} aclTensor;

/* The value in both forms: which one counts depends on the type of the tensor that it goes to. */
typedef struct aclScalar {
    double real;
    int64_t integer;
} aclScalar;

typedef struct aclIntArray {
    uint64_t size;
    int64_t values[];
} aclIntArray;

typedef struct aclTensorList {
    uint64_t size;
    aclTensor *tensors[];
} aclTensorList;

/* ---- aclnn_arguments.c */
size_t sim_element_size(int type);     /* bytes; 0: no such type */
int64_t sim_to_integer(double value);  /* INT64_MIN for what does not fit, NaN included */
/* The part of a tensor: `size` entries of a dimension, from `start`. */
aclTensor sim_narrow(const aclTensor *tensor, int64_t dimension, int64_t start, int64_t size);

/* ---- aclnn_assign.c: destination <- source, with broadcasting, strides and casts; for work on a stream */
aclError sim_assign(const aclTensor *destination, const aclTensor *source);
aclError sim_fill(const aclTensor *destination, const aclScalar *value);
aclError sim_read_integers(const aclTensor *source, int64_t *values); /* of one dimension */

#endif
