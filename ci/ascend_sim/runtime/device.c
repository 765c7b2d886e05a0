/* Devices: how many there are, which one a thread uses, what they are called. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ascend_sim.h"

struct visible {
    int count;
    int physical[SIM_MAX_DEVICES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct visible fixed; /* since the first aclrtSetDevice */
static bool is_fixed;
static bool used[SIM_MAX_DEVICES]; /* by aclrtSetDevice; in this process's numbers */
static bool initialised;
static _Thread_local int current = SIM_NO_DEVICE;

/* Of an Ascend 910B3, by aclrtDevResLimitType. */
static const uint32_t cores[] = {20, 40};
enum { KINDS_OF_CORES = sizeof cores / sizeof *cores };
static uint32_t limits[SIM_MAX_DEVICES][KINDS_OF_CORES]; /* 0: none */

/* As CANN reads ASCEND_RT_VISIBLE_DEVICES: numbers between commas; the list ends at the first bad one. */
static struct visible read_visible(void) {
    struct visible seen = {0};
    long present = sim_setting("ASCEND_SIM_DEVICES", 2);
    if (present > SIM_MAX_DEVICES) {
        present = SIM_MAX_DEVICES;
    }
    const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (list == NULL) {
        for (; seen.count < present; seen.count++) {
            seen.physical[seen.count] = seen.count;
        }
        return seen;
    }
    while (*list != '\0' && seen.count < SIM_MAX_DEVICES) {
        char *end;
        long number = strtol(list, &end, 10);
        if (end == list || number < 0 || number >= present) {
            break;
        }
        seen.physical[seen.count++] = (int)number;
        list = *end == ',' ? end + 1 : end;
    }
    return seen;
}

/* A change of the environment counts until the process uses a device. */
static struct visible visible(void) {
    pthread_mutex_lock(&lock);
    struct visible seen = is_fixed ? fixed : read_visible();
    pthread_mutex_unlock(&lock);
    return seen;
}

static aclError check_device(int device) {
    const struct visible seen = visible();
    if (device < 0 || device >= seen.count) {
        return sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %d of %d", device, seen.count);
    }
    return ACL_SUCCESS;
}

int sim_current_device(void) {
    return current;
}

void sim_become_thread_of(int device) {
    current = device;
}

int sim_physical(int device) {
    const struct visible seen = visible();
    return device >= 0 && device < seen.count ? seen.physical[device] : SIM_NO_DEVICE;
}

int sim_visible_as(int physical) {
    const struct visible seen = visible();
    for (int device = 0; device < seen.count; device++) {
        if (seen.physical[device] == physical) {
            return device;
        }
    }
    return SIM_NO_DEVICE;
}

SIM_API aclError aclInit(UNUSED const char *configuration) {
    if (initialised) {
        return ACL_ERROR_REPEAT_INITIALIZE;
    }
    initialised = true;
    return ACL_SUCCESS;
}

SIM_API aclError aclFinalize(void) {
    initialised = false;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)visible().count;
    return *count > 0 ? ACL_SUCCESS : sim_fail(ACL_ERROR_RT_NO_DEVICE, "no device");
}

SIM_API aclError aclrtSetDevice(int32_t device) {
    aclError status = check_device(device);
    if (status != ACL_SUCCESS) {
        return status;
    }
    pthread_mutex_lock(&lock);
    if (!is_fixed) {
        fixed = read_visible();
        is_fixed = true;
    }
    used[device] = true;
    pthread_mutex_unlock(&lock);
    current = device;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetDevice(int32_t *device) {
    if (current == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device set in this thread");
    }
    *device = current;
    return ACL_SUCCESS;
}

/* CANN frees what the device holds; here it stays until the process ends. */
SIM_API aclError aclrtResetDevice(int32_t device) {
    return check_device(device);
}

/* A context of CANN is a device's state in a process. There is one per device here: its number plus 1. */
SIM_API aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no context in this thread");
    }
    *context = (aclrtContext)(uintptr_t)(current + 1);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtSetCurrentContext(aclrtContext context) {
    int device = (int)(uintptr_t)context - 1;
    aclError status = check_device(device);
    if (status == ACL_SUCCESS) {
        current = device;
    }
    return status;
}

SIM_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags != NULL) {
        *flags = 0;
    }
    aclError status = check_device(device);
    *active = status == ACL_SUCCESS && used[device];
    return status;
}

static aclError check_cores(int device, unsigned type) {
    aclError status = check_device(device);
    if (status == ACL_SUCCESS && type >= KINDS_OF_CORES) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "cores of type %u", type);
    }
    return status;
}

/* Kept and told; operators take as long with fewer cores. */
SIM_API aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t value) {
    aclError status = check_cores(device, type);
    if (status == ACL_SUCCESS && (value == 0 || value > cores[type])) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%u of %u cores of type %d", value, cores[type], type);
    }
    if (status == ACL_SUCCESS) {
        pthread_mutex_lock(&lock);
        limits[device][type] = value;
        pthread_mutex_unlock(&lock);
    }
    return status;
}

SIM_API aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) {
    aclError status = check_cores(device, type);
    if (status == ACL_SUCCESS) {
        pthread_mutex_lock(&lock);
        *value = limits[device][type] > 0 ? limits[device][type] : cores[type];
        pthread_mutex_unlock(&lock);
    }
    return status;
}

SIM_API const char *aclrtGetSocName(void) {
    return sim_text_setting("ASCEND_SIM_SOC", "Ascend910B3");
}

SIM_API aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    aclError status = check_device(device);
    if (status == ACL_SUCCESS) {
        memset(uuid, 0, sizeof *uuid);
        snprintf((char *)uuid, sizeof *uuid, "sim-%d", sim_physical(device));
    }
    return status;
}

/* CANN's "logical" number is the one before ASCEND_RT_VISIBLE_DEVICES, the "user's" the one after it. */
SIM_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) {
    aclError status = check_device(user);
    if (status == ACL_SUCCESS) {
        *logical = sim_physical(user);
    }
    return status;
}

SIM_API aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    aclError status = check_device(device);
    if (status == ACL_SUCCESS) {
        status = check_device(peer);
    }
    *can = status == ACL_SUCCESS && device != peer;
    return status;
}

/* Accepted; copies between devices work without it too. */
SIM_API aclError aclrtDeviceEnablePeerAccess(int32_t peer, UNUSED uint32_t flags) {
    return check_device(peer);
}

SIM_API aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}
