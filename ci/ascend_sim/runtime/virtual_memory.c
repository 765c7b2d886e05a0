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

/* A shareable handle is the owner's process and the number of its file. */
SIM_API aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, UNUSED aclrtMemHandleType type,
                                                 UNUSED uint64_t flags, uint64_t *shareable) {
    const struct physical_memory *memory = (const struct physical_memory *)handle;
    *shareable = (uint64_t)getpid() << 32 | (uint32_t)memory->fd;
    return ACL_SUCCESS;
}

/* Accepted, not enforced: any process of the same user may import. */
SIM_API aclError aclrtMemSetPidToShareableHandle(UNUSED uint64_t shareable, UNUSED int32_t *pids,
                                                 UNUSED size_t count) {
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMemImportFromShareableHandle(uint64_t shareable, UNUSED int32_t device,
                                                   aclrtDrvMemHandle *handle) {
    int fd;
    size_t size;
    aclError status = sim_open_backing((pid_t)(shareable >> 32), (int)(uint32_t)shareable, 0, &fd, &size);
    if (status == ACL_SUCCESS) {
        *handle = new_handle(fd, SIM_NO_DEVICE, size);
    }
    return status;
}
