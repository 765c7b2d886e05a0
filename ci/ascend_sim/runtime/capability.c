/* What the device and the software say of themselves, and options that change nothing here. */
#include <stdio.h>
#include <string.h>

#include "ascend_sim.h"

enum { AI_CORES = 20, VECTOR_CORES = 40 }; /* of an Ascend 910B3 */
static const int64_t L2_BYTES = (int64_t)192 << 20;

static const char *cann_version(void) {
    return sim_text_setting("ASCEND_SIM_CANN", "8.5.0");
}

SIM_API aclError aclGetDeviceCapability(UNUSED uint32_t device, aclDeviceInfo information, int64_t *value) {
    switch (information) {
    case ACL_DEVICE_INFO_AI_CORE_NUM:
        *value = AI_CORES;
        return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
        *value = VECTOR_CORES;
        return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE:
        *value = L2_BYTES;
        return ACL_SUCCESS;
    default:
        return sim_fail(ACL_ERROR_INVALID_PARAM, "device capability %d is not simulated", information);
    }
}

/* torch_npu asks for numbers of cores only. */
SIM_API aclError aclrtGetDeviceInfo(UNUSED uint32_t device, UNUSED aclrtDevAttr attribute, int64_t *value) {
    *value = AI_CORES;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetDeviceUtilizationRate(UNUSED int32_t device, aclrtUtilizationInfo *rates) {
    memset(rates, 0, sizeof *rates);
    return ACL_SUCCESS;
}

SIM_API aclError aclGetCannAttribute(UNUSED aclCannAttr attribute, int32_t *value) {
    *value = 1;
    return ACL_SUCCESS;
}

SIM_API aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    static const aclCannAttr all[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
    *list = all;
    *count = sizeof all / sizeof all[0];
    return ACL_SUCCESS;
}

SIM_API aclError aclsysGetCANNVersion(UNUSED aclCANNPackageName name, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    snprintf(version->version, sizeof version->version, "%s", cann_version());
    return ACL_SUCCESS;
}

SIM_API aclError aclsysGetVersionStr(UNUSED char *package, char *text) {
    snprintf(text, ACL_PKG_VERSION_MAX_SIZE, "%s", cann_version());
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetDeviceSatMode(UNUSED aclrtFloatOverflowMode mode) {
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetOpExecuteTimeOut(UNUSED uint32_t seconds) {
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t *actual) {
    *actual = microseconds;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetOpWaitTimeout(UNUSED uint32_t seconds) {
    return ACL_SUCCESS;
}

static int64_t options[8];
enum { OPTIONS = sizeof options / sizeof options[0] };

static aclError option_at(aclSysParamOpt option, int64_t **value) {
    if ((unsigned)option >= OPTIONS) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "system option %d is not simulated", option);
    }
    *value = &options[option];
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    int64_t *place = NULL;
    aclError status = option_at(option, &place);
    if (status == ACL_SUCCESS) {
        *place = value;
    }
    return status;
}

SIM_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    int64_t *place = NULL;
    aclError status = option_at(option, &place);
    if (status == ACL_SUCCESS) {
        *value = *place;
    }
    return status;
}

/* CANN keeps these per context; here they are the process's. */
SIM_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    return aclrtSetSysParamOpt(option, value);
}

SIM_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    return aclrtGetSysParamOpt(option, value);
}

/* Failures come back from the call, or from the next wait for the stream; none is kept elsewhere. */
SIM_API aclError aclrtPeekAtLastError(UNUSED aclrtLastErrLevel level) {
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetLastError(UNUSED aclrtLastErrLevel level) {
    return ACL_SUCCESS;
}
