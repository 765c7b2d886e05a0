/* Host code on a stream: CANN's host functions, and time that a kernel would take. */
#include <unistd.h>

#include "ascend_sim.h"

struct host_call {
    aclrtHostFunc function;
    void *argument;
};

static aclError run_host_call(void *argument) {
    const struct host_call *call = argument;
    call->function(call->argument);
    return ACL_SUCCESS;
}

/* The function runs in the stream's thread. */
SIM_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
    const struct host_call call = {.function = function, .argument = argument};
    return sim_enqueue(stream, run_host_call, &call, sizeof call);
}

/* libtorch_npu.so needs this name to load. It belongs to aclrtSubscribeReport and aclrtLaunchCallback, an
 * older way to call the host, which is not simulated. */
SIM_API aclError aclrtProcessReport(UNUSED int32_t milliseconds) {
    return sim_fail(ACL_ERROR_API_NOT_SUPPORT, "aclrtProcessReport is not simulated; use aclrtLaunchHostFunc");
}

static aclError pass_time(void *argument) {
    const uint64_t *microseconds = argument;
    usleep((useconds_t)*microseconds);
    return ACL_SUCCESS;
}

/* For the double of the operators. */
SIM_API aclError ascend_sim_delay(aclrtStream stream, uint64_t microseconds) {
    return sim_enqueue(stream, pass_time, &microseconds, sizeof microseconds);
}
