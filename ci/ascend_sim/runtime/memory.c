/* Device memory of aclrtMalloc.
 *
 * Not simulated: memory that is short because it is fragmented, and the content of fresh memory, which is
 * zero here and anything at all on a device. */
#include <string.h>

#include "ascend_sim.h"

enum { HOST_PAGE_BYTES = 4096 };

static aclError physical_of_thread(int *physical) {
    *physical = sim_physical(sim_current_device());
    if (*physical == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device set in this thread");
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMalloc(void **out, size_t size, UNUSED aclrtMemMallocPolicy policy) {
    int physical;
    int fd;
    aclError status = physical_of_thread(&physical);
    if (status != ACL_SUCCESS) {
        return status;
    }
    if (size == 0 || size > SIZE_MAX - SIM_PAGE_BYTES) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclrtMalloc of %zu bytes", size);
    }
    size = (size + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
    status = sim_new_backing(physical, size, &fd);
    if (status != ACL_SUCCESS) {
        return status;
    }
    void *address = sim_reserve(size, SIM_PAGE_BYTES);
    if (address == NULL) {
        status = sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device addresses for %zu bytes", size);
    } else {
        status = sim_map(address, size, fd, 0, physical, SIM_ALLOCATED);
    }
    if (status != ACL_SUCCESS) {
        if (address != NULL) {
            sim_release(address);
        }
        sim_close_backing(physical, size, fd);
        return status;
    }
    *out = address;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(out, size, policy);
}

/* As CANN, it does not wait for work that still uses the memory. Such a copy fails; a collective or a
 * kernel that is in the middle of it faults. */
SIM_API aclError aclrtFree(void *address) {
    struct sim_mapping was;
    if (!sim_unmap(address, SIM_ALLOCATED, &was)) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclrtFree(%p): not an allocation", address);
    }
    sim_release(address);
    sim_close_backing(was.physical, was.size, was.fd);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtGetMemInfo(UNUSED aclrtMemAttr kind, size_t *unused, size_t *total) {
    int physical;
    aclError status = physical_of_thread(&physical);
    if (status == ACL_SUCCESS) {
        size_t used = sim_memory_used(physical);
        *total = sim_memory_total();
        *unused = used < *total ? *total - used : 0;
    }
    return status;
}

/* Which part of CANN uses how much memory; here there are no such parts. */
SIM_API aclError aclrtGetMemUsageInfo(UNUSED int32_t device, UNUSED aclrtMemUsageInfo *list,
                                      UNUSED size_t room, size_t *count) {
    *count = 0;
    return ACL_SUCCESS;
}

SIM_API aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
    struct sim_mapping mapping;
    memset(attributes, 0, sizeof *attributes);
    attributes->pageSize = HOST_PAGE_BYTES;
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    if (sim_find_mapping(address, &mapping)) {
        int device = sim_visible_as(mapping.physical);
        /* Memory of a device that this process does not see belongs to the device that opened it. */
        attributes->location.id = (uint32_t)(device != SIM_NO_DEVICE ? device : sim_current_device());
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    } else if (sim_is_pinned(address)) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
    }
    return ACL_SUCCESS;
}
