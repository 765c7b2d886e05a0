/* Kernels compiled for the device: refused. libtorch_npu.so needs these names to load; the rt functions are
 * of a layer below acl, whose headers the wheel does not have, and their arguments are not looked at. */
#include "ascend_sim.h"

static aclError refuse(const char *function) {
    return sim_fail(ACL_ERROR_API_NOT_SUPPORT, "%s: kernels of the device are not simulated", function);
}

SIM_API int rtDevBinaryRegister(void) {
    return refuse(__func__);
}

SIM_API int rtFunctionRegister(void) {
    return refuse(__func__);
}

SIM_API int rtGetC2cCtrlAddr(void) {
    return refuse(__func__);
}

SIM_API int rtKernelLaunch(void) {
    return refuse(__func__);
}

SIM_API aclError aclrtBinaryGetFunction(UNUSED const aclrtBinHandle binary, UNUSED const char *name,
                                        UNUSED aclrtFuncHandle *function) {
    return refuse(__func__);
}

SIM_API aclError aclrtBinaryLoadFromData(UNUSED const void *data, UNUSED size_t size,
                                         UNUSED const aclrtBinaryLoadOptions *options,
                                         UNUSED aclrtBinHandle *binary) {
    return refuse(__func__);
}

SIM_API aclError aclrtGetFunctionAddr(UNUSED aclrtFuncHandle function, UNUSED void **aicore_address,
                                      UNUSED void **vector_address) {
    return refuse(__func__);
}
