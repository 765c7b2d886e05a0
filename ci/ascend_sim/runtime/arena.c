/* Device addresses.
 *
 * Two ranges of 1 TiB are reserved in the process. Device addresses come from the first, which stays
 * without any access: a host that dereferences one is killed by SIGSEGV and cannot go unnoticed. The bytes
 * of an address lie at the same offset in the second range, which the runtime reads and writes. So does the
 * double of the operators, whose memory.py repeats the distance.
 *
 * Addresses are reserved (sim_reserve), and get bytes by a mapping of a file (sim_map). Both lists are
 * searched from their start: tests have hundreds of allocations, not millions. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ascend_sim.h"

#define ARENA_BYTES ((size_t)1 << 40)

struct reservation {
    uintptr_t address;
    size_t size;
    struct reservation *next; /* at a higher address */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uintptr_t base; /* of the first range; 0: the host refused */
static struct reservation *reservations;
static struct sim_mapping *mappings;

static void reserve_arena(void) {
    void *ranges = mmap(NULL, 2 * ARENA_BYTES + SIM_PAGE_BYTES, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ranges != MAP_FAILED) {
        base = ((uintptr_t)ranges + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
    }
}

static void *bytes_of(uintptr_t address) {
    return (void *)(address + ARENA_BYTES);
}

static uintptr_t round_up(uintptr_t address, size_t alignment) {
    return (address + alignment - 1) / alignment * alignment;
}

/* Unlike aclrtMalloc's, these addresses have no memory yet. */
void *sim_reserve(size_t size, size_t alignment) {
    pthread_once(&once, reserve_arena);
    if (base == 0 || size == 0 || size > ARENA_BYTES) {
        return NULL;
    }
    if (alignment < SIM_PAGE_BYTES) {
        alignment = SIM_PAGE_BYTES;
    }
    pthread_mutex_lock(&lock);
    uintptr_t address = round_up(base, alignment);
    struct reservation **place = &reservations;
    while (*place != NULL && address + size > (*place)->address) {
        address = round_up((*place)->address + (*place)->size, alignment);
        place = &(*place)->next;
    }
    bool fits = address + size <= base + ARENA_BYTES;
    if (fits) {
        struct reservation *taken = sim_new(sizeof *taken);
        *taken = (struct reservation){.address = address, .size = size, .next = *place};
        *place = taken;
    }
    pthread_mutex_unlock(&lock);
    return fits ? (void *)address : NULL;
}

static bool overlaps(const struct sim_mapping *mapping, uintptr_t address, size_t size) {
    return mapping->address < address + size && address < mapping->address + mapping->size;
}

static bool anything_mapped_in(uintptr_t address, size_t size) {
    for (const struct sim_mapping *mapping = mappings; mapping != NULL; mapping = mapping->next) {
        if (overlaps(mapping, address, size)) {
            return true;
        }
    }
    return false;
}

bool sim_release(void *address) {
    pthread_mutex_lock(&lock);
    struct reservation **place = &reservations;
    while (*place != NULL && (*place)->address != (uintptr_t)address) {
        place = &(*place)->next;
    }
    struct reservation *found = *place;
    bool released = found != NULL && !anything_mapped_in(found->address, found->size);
    if (released) {
        *place = found->next;
        free(found);
    }
    pthread_mutex_unlock(&lock);
    return released;
}

static bool is_reserved(uintptr_t address, size_t size) {
    for (const struct reservation *taken = reservations; taken != NULL; taken = taken->next) {
        if (taken->address <= address && address + size <= taken->address + taken->size) {
            return true;
        }
    }
    return false;
}

aclError sim_map(void *address, size_t size, int fd, off_t offset, int physical, enum sim_mapping_kind kind) {
    const uintptr_t start = (uintptr_t)address;
    aclError status = ACL_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!is_reserved(start, size) || anything_mapped_in(start, size)) {
        status = sim_fail(ACL_ERROR_INVALID_PARAM, "%zu bytes at %p are not reserved, or mapped already", size,
                          address);
    } else if (mmap(bytes_of(start), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, offset) ==
               MAP_FAILED) {
        status = sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no mapping of %zu bytes: %s", size, strerror(errno));
    } else {
        struct sim_mapping *mapping = sim_new(sizeof *mapping);
        *mapping = (struct sim_mapping){
            .address = start, .size = size, .fd = fd, .physical = physical, .kind = kind, .next = mappings};
        mappings = mapping;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* False: nothing of this kind is mapped at this address. */
bool sim_unmap(void *address, enum sim_mapping_kind kind, struct sim_mapping *was) {
    pthread_mutex_lock(&lock);
    struct sim_mapping **place = &mappings;
    while (*place != NULL && ((*place)->address != (uintptr_t)address || (*place)->kind != kind)) {
        place = &(*place)->next;
    }
    struct sim_mapping *found = *place;
    if (found != NULL) {
        mmap(bytes_of(found->address), found->size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        *place = found->next;
        *was = *found;
        free(found);
    }
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

static const struct sim_mapping *mapping_at(uintptr_t address) {
    for (const struct sim_mapping *mapping = mappings; mapping != NULL; mapping = mapping->next) {
        if (overlaps(mapping, address, 1)) {
            return mapping;
        }
    }
    return NULL;
}

bool sim_find_mapping(const void *address, struct sim_mapping *found) {
    pthread_mutex_lock(&lock);
    const struct sim_mapping *mapping = mapping_at((uintptr_t)address);
    if (mapping != NULL) {
        *found = *mapping;
    }
    pthread_mutex_unlock(&lock);
    return mapping != NULL;
}

/* Where [address, address + size) is, and where its bytes are. Neighbouring mappings count as one, as in
 * torch_npu's expandable segments. */
enum sim_place sim_locate(const void *address, size_t size, void **bytes) {
    const uintptr_t start = (uintptr_t)address;
    *bytes = (void *)address;
    if (base == 0 || start < base || start >= base + ARENA_BYTES) {
        return SIM_HOST;
    }
    *bytes = bytes_of(start);
    if (size > base + ARENA_BYTES - start) {
        return SIM_NOWHERE;
    }
    uintptr_t at = start;
    const struct sim_mapping *mapping;
    pthread_mutex_lock(&lock);
    do {
        mapping = mapping_at(at);
        if (mapping != NULL) {
            at = mapping->address + mapping->size;
        }
    } while (mapping != NULL && at < start + size);
    pthread_mutex_unlock(&lock);
    return mapping != NULL ? SIM_DEVICE : SIM_NOWHERE;
}
