/* Virtual memory management: addresses and bytes apart. torch_npu uses it with
 * PYTORCH_NPU_ALLOC_CONF=expandable_segments:True. Not simulated: granularity. */
#include <stdlib.h>
#include <unistd.h>

#include "ascend_sim.h"

/* What an aclrtDrvMemHandle points at. */
struct physical_memory {
    int fd;
    int physical; /* device; SIM_NO_DEVICE: another process's memory */
    size_t size;
};

SIM_API aclError aclrtReserveMemAddress(void **out, size_t size, size_t alignment, UNUSED void *expected,
                                        UNUSED uint64_t flags) {
    *out = sim_reserve(size, alignment);
    return *out != NULL ? ACL_SUCCESS
                        : sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device addresses for %zu bytes", size);
}

SIM_API aclError aclrtReleaseMemAddress(void *address) {
    if (!sim_release(address)) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "release %p: not reserved, or still mapped", address);
    }
    return ACL_SUCCESS;
}

static aclrtDrvMemHandle new_handle(int fd, int physical, size_t size) {
    struct physical_memory *memory = sim_new(sizeof *memory);
    *memory = (struct physical_memory){.fd = fd, .physical = physical, .size = size};
    return (aclrtDrvMemHandle)memory;
}

SIM_API aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *wanted,
                                     UNUSED uint64_t flags) {
    int physical = sim_physical((int)wanted->location.id);
    int fd;
    if (physical == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %u", wanted->location.id);
    }
    aclError status = sim_new_backing(physical, size, &fd);
    if (status == ACL_SUCCESS) {
        *handle = new_handle(fd, physical, size);
    }
    return status;
}

/* Bytes that are still mapped stay until they are unmapped. */
SIM_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    struct physical_memory *memory = (struct physical_memory *)handle;
    if (memory->physical == SIM_NO_DEVICE) {
        close(memory->fd);
    } else {
        sim_close_backing(memory->physical, memory->size, memory->fd);
    }
    free(memory);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle,
                             UNUSED uint64_t flags) {
    const struct physical_memory *memory = (const struct physical_memory *)handle;
    if (offset > memory->size || size > memory->size - offset) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "map %zu bytes from %zu of a memory of %zu", size, offset,
                        memory->size);
    }
    return sim_map(address, size, memory->fd, (off_t)offset, memory->physical, SIM_MAPPED);
}

SIM_API aclError aclrtUnmapMem(void *address) {
    struct sim_mapping was;
    if (!sim_unmap(address, SIM_MAPPED, &was)) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "unmap %p: not the start of a mapping", address);
    }
    return ACL_SUCCESS;
}

/* A shareable handle is the owner's process, and the numbers of its export's file and of the memory's. */
SIM_API aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, UNUSED aclrtMemHandleType type,
                                                 uint64_t flags, uint64_t *shareable) {
    const struct physical_memory *memory = (const struct physical_memory *)handle;
    int export = sim_new_export(memory->physical, (flags & ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION) != 0);
    if (export < 0 || export > UINT16_MAX || memory->fd > UINT16_MAX) {
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "export: too many files are open");
    }
    *shareable = (uint64_t)getpid() << 32 | (uint64_t)export << 16 | (uint64_t)memory->fd;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMemSetPidToShareableHandle(uint64_t shareable, int32_t *pids, size_t count) {
    return sim_allow_import((pid_t)(shareable >> 32), (int)(shareable >> 16 & UINT16_MAX), pids, count);
}

/* Only for the device that the memory is on: others reach it by its key. */
SIM_API aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device, aclrtDrvMemHandle *handle) {
    int fd;
    int physical;
    size_t size;
    const pid_t owner = (pid_t)(shareable >> 32);
    aclError status = sim_check_import(owner, (int)(shareable >> 16 & UINT16_MAX), &physical);
    if (status == ACL_SUCCESS && physical != sim_physical(device)) {
        status = sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "memory of device %d, imported for device %d", physical,
                          sim_physical(device));
    }
    if (status != ACL_SUCCESS) {
        return status;
    }
    status = sim_open_backing(owner, (int)(shareable & UINT16_MAX), 0, &fd, &size);
    if (status == ACL_SUCCESS) {
        *handle = new_handle(fd, SIM_NO_DEVICE, size);
    }
    return status;
}
