/* The profiler and dumping: accepted and dropped. libtorch_npu.so needs the names to load. */
#include "ascend_sim.h"

SIM_API uint64_t MsprofGetHashId(const char *text, size_t size) {
    uint64_t hash = 14695981039346656037U; /* FNV-1a */
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ (unsigned char)text[i]) * 1099511628211U;
    }
    return hash;
}

SIM_API int MsprofRegisterCallback(UNUSED uint32_t module, UNUSED void *handler) {
    return ACL_SUCCESS;
}

SIM_API int MsprofReportAdditionalInfo(UNUSED uint32_t aging, UNUSED const void *data, UNUSED uint32_t size) {
    return ACL_SUCCESS;
}

SIM_API int MsprofReportCompactInfo(UNUSED uint32_t aging, UNUSED const void *data, UNUSED uint32_t size) {
    return ACL_SUCCESS;
}

SIM_API int MsprofReportApi(UNUSED uint32_t aging, UNUSED const void *api) {
    return ACL_SUCCESS;
}

SIM_API uint64_t MsprofSysCycleTime(void) {
    return 0;
}

SIM_API aclError aclmdlInitDump(void) {
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlFinalizeDump(void) {
    return ACL_SUCCESS;
}

SIM_API aclError aclmdlSetDump(UNUSED const char *path) {
    return ACL_SUCCESS;
}
