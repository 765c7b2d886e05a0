/* Pinned host memory: allocated here, or registered. Pinned means remembered: a copy from or to it is
 * asynchronous, a copy from or to other host memory is not (copies.c). */
#include <pthread.h>
#include <stdlib.h>

#include "ascend_sim.h"

enum { HOST_ALIGNMENT = 4096 };

struct pinned {
    uintptr_t address;
    uint64_t size;
    struct pinned *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pinned *list;

static void remember(void *address, uint64_t size) {
    struct pinned *entry = sim_new(sizeof *entry);
    pthread_mutex_lock(&lock);
    *entry = (struct pinned){.address = (uintptr_t)address, .size = size, .next = list};
    list = entry;
    pthread_mutex_unlock(&lock);
}

static bool forget(const void *address) {
    pthread_mutex_lock(&lock);
    struct pinned **place = &list;
    while (*place != NULL && (*place)->address != (uintptr_t)address) {
        place = &(*place)->next;
    }
    struct pinned *found = *place;
    if (found != NULL) {
        *place = found->next;
    }
    pthread_mutex_unlock(&lock);
    free(found);
    return found != NULL;
}

bool sim_is_pinned(const void *address) {
    const uintptr_t at = (uintptr_t)address;
    pthread_mutex_lock(&lock);
    const struct pinned *entry = list;
    while (entry != NULL && (at < entry->address || at - entry->address >= entry->size)) {
        entry = entry->next;
    }
    pthread_mutex_unlock(&lock);
    return entry != NULL;
}

SIM_API aclError aclrtMallocHost(void **out, size_t size) {
    if (posix_memalign(out, HOST_ALIGNMENT, size > 0 ? size : 1) != 0) {
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no %zu bytes of host memory", size);
    }
    remember(*out, size);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtMallocHostWithCfg(void **out, uint64_t size, UNUSED aclrtMallocConfig *configuration) {
    return aclrtMallocHost(out, size);
}

SIM_API aclError aclrtFreeHost(void *address) {
    if (!forget(address)) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclrtFreeHost(%p): not pinned here", address);
    }
    free(address);
    return ACL_SUCCESS;
}

static aclError register_host(void *address, uint64_t size) {
    void *bytes;
    if (address == NULL || size == 0 || sim_locate(address, size, &bytes) != SIM_HOST) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "register %lu bytes at %p: not host memory",
                        (unsigned long)size, address);
    }
    remember(address, size);
    return ACL_SUCCESS;
}

SIM_API aclError aclrtHostRegisterV2(void *address, uint64_t size, UNUSED uint32_t flags) {
    return register_host(address, size);
}

/* CANN gives a device address for the memory; here it is the host's, which copies accept as host memory. */
SIM_API aclError aclrtHostRegister(void *address, uint64_t size, UNUSED aclrtHostRegisterType type,
                                   void **device_address) {
    *device_address = address;
    return register_host(address, size);
}

SIM_API aclError aclrtHostUnregister(void *address) {
    if (!forget(address)) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclrtHostUnregister(%p): not registered", address);
    }
    return ACL_SUCCESS;
}
