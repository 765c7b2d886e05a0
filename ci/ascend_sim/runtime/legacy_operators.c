/* The operator interface from before aclnn. Descriptions can be made, because libtorch_npu.so needs the names
 * to load; running an operator is refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "ascend_sim.h"

enum { DESCRIBED_DIMENSIONS = 8, OPTION_BYTES = 8 };

struct aclDataBuffer {
    void *data;
    size_t size;
};

struct aclTensorDesc {
    aclDataType type;
    aclFormat format;
    int dimensions;
    int64_t shape[DESCRIBED_DIMENSIONS];
};

SIM_API aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
    aclDataBuffer *buffer = sim_new(sizeof *buffer);
    *buffer = (aclDataBuffer){.data = data, .size = size};
    return buffer;
}

SIM_API aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    free((void *)buffer);
    return ACL_SUCCESS;
}

SIM_API aclError aclSetTensorShape(aclTensorDesc *description, int dimensions, const int64_t *shape) {
    if (dimensions < 0 || dimensions > DESCRIBED_DIMENSIONS) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "description of %d dimensions (at most %d)", dimensions,
                        DESCRIBED_DIMENSIONS);
    }
    description->dimensions = dimensions;
    memcpy(description->shape, shape, (size_t)dimensions * sizeof *shape);
    return ACL_SUCCESS;
}

SIM_API aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *shape,
                                           aclFormat format) {
    aclTensorDesc *description = sim_new(sizeof *description);
    description->type = type;
    description->format = format;
    if (aclSetTensorShape(description, dimensions, shape) != ACL_SUCCESS) {
        free(description);
        return NULL;
    }
    return description;
}

SIM_API void aclDestroyTensorDesc(const aclTensorDesc *description) {
    free((void *)description);
}

SIM_API aclError aclGetTensorDescDimV2(const aclTensorDesc *description, size_t index, int64_t *size) {
    if (index >= (size_t)description->dimensions) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "dimension %zu of %d", index, description->dimensions);
    }
    *size = description->shape[index];
    return ACL_SUCCESS;
}

SIM_API aclFormat aclGetTensorDescFormat(const aclTensorDesc *description) {
    return description->format;
}

SIM_API size_t aclGetTensorDescNumDims(const aclTensorDesc *description) {
    return (size_t)description->dimensions;
}

SIM_API aclDataType aclGetTensorDescType(const aclTensorDesc *description) {
    return description->type;
}

SIM_API void aclSetTensorDescName(UNUSED aclTensorDesc *description, UNUSED const char *name) {
}

SIM_API aclError aclSetTensorFormat(aclTensorDesc *description, aclFormat format) {
    description->format = format;
    return ACL_SUCCESS;
}

SIM_API aclError aclSetTensorPlaceMent(UNUSED aclTensorDesc *description, UNUSED aclMemType place) {
    return ACL_SUCCESS;
}

/* Attributes of an operator that will be refused. */
SIM_API aclopAttr *aclopCreateAttr(void) {
    return sim_new(1);
}

SIM_API void aclopDestroyAttr(const aclopAttr *attributes) {
    free((void *)attributes);
}

SIM_API aclError aclopSetAttrBool(UNUSED aclopAttr *attributes, UNUSED const char *name, UNUSED uint8_t value) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrDataType(UNUSED aclopAttr *attributes, UNUSED const char *name,
                                      UNUSED aclDataType value) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrFloat(UNUSED aclopAttr *attributes, UNUSED const char *name, UNUSED float value) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrInt(UNUSED aclopAttr *attributes, UNUSED const char *name, UNUSED int64_t value) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrString(UNUSED aclopAttr *attributes, UNUSED const char *name,
                                    UNUSED const char *value) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrListBool(UNUSED aclopAttr *attributes, UNUSED const char *name, UNUSED int count,
                                      UNUSED const uint8_t *values) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrListFloat(UNUSED aclopAttr *attributes, UNUSED const char *name, UNUSED int count,
                                       UNUSED const float *values) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrListInt(UNUSED aclopAttr *attributes, UNUSED const char *name, UNUSED int count,
                                     UNUSED const int64_t *values) {
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetAttrListListInt(UNUSED aclopAttr *attributes, UNUSED const char *name, UNUSED int count,
                                         UNUSED const int *sizes, UNUSED const int64_t *const values[]) {
    return ACL_SUCCESS;
}

/* With torch_npu's task queue the caller hears of the refusal later or never, so it is printed at once. */
SIM_API aclError aclopCompileAndExecute(const char *name, UNUSED int input_count,
                                        UNUSED const aclTensorDesc *const input_descriptions[],
                                        UNUSED const aclDataBuffer *const inputs[], UNUSED int output_count,
                                        UNUSED const aclTensorDesc *const output_descriptions[],
                                        UNUSED aclDataBuffer *const outputs[], UNUSED const aclopAttr *attributes,
                                        UNUSED aclopEngineType engine, UNUSED aclopCompileType compile,
                                        UNUSED const char *path, UNUSED aclrtStream stream) {
    fprintf(stderr, "ascend_sim: operator %s is not simulated\n", name);
    return sim_fail(ACL_ERROR_OP_NOT_FOUND, "operator %s is not simulated", name);
}

SIM_API aclError aclSetCompileopt(UNUSED aclCompileOpt option, UNUSED const char *value) {
    return ACL_SUCCESS;
}

SIM_API size_t aclGetCompileoptSize(UNUSED aclCompileOpt option) {
    return OPTION_BYTES;
}

SIM_API aclError aclGetCompileopt(UNUSED aclCompileOpt option, char *value, size_t size) {
    if (size > 0) {
        *value = '\0';
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclopSetCompileFlag(UNUSED aclOpCompileFlag flag) {
    return ACL_SUCCESS;
}
