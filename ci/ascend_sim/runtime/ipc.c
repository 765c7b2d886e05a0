/* Device memory shared with another process by a key: aclrtIpcMem*.
 *
 * A key names the exporting process, the file, the file's inode and the physical device, so that memory
 * can be opened in a process that does not see its device, as CANN allows for peers. The importer sees
 * the same bytes and its mapping outlives the exporter's; what CANN does then is not documented. A key
 * whose exporter died or freed the memory is refused, and so is one of another device where the importer
 * does not ask for peer access. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ascend_sim.h"

enum { KEY_BYTES = 65 }; /* what callers of CANN provide room for, with the end */

struct import {
    char key[KEY_BYTES];
    void *address;
    struct import *next;
};

struct key {
    int owner;
    int fd;
    unsigned long inode;
    int physical;
    int export;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct import *imports;

static bool read_key(const char *text, struct key *key) {
    return sscanf(text, "asim:%d:%d:%lu:%d:%d", &key->owner, &key->fd, &key->inode, &key->physical,
                  &key->export) == 5 &&
           key->physical >= 0 && key->physical < SIM_MAX_DEVICES;
}

SIM_API aclError aclrtIpcMemGetExportKey(void *address, size_t size, char *key, size_t room,
                                         uint64_t flags) {
    struct sim_mapping mapping;
    if (!sim_find_mapping(address, &mapping) || mapping.address != (uintptr_t)address ||
        mapping.kind != SIM_ALLOCATED || size > mapping.size) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "export %zu bytes at %p: not an allocation", size, address);
    }
    int export = sim_new_export(mapping.physical, (flags & ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION) != 0);
    int length = snprintf(key, room, "asim:%d:%d:%lu:%d:%d", (int)getpid(), mapping.fd,
                          (unsigned long)sim_backing_inode(mapping.fd), mapping.physical, export);
    if (length < 0 || (size_t)length >= room || length >= KEY_BYTES) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "export: a key of %d bytes in room for %zu", length, room);
    }
    return ACL_SUCCESS;
}

SIM_API aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count) {
    struct key parts;
    return read_key(key, &parts) ? sim_allow_import(parts.owner, parts.export, pids, count)
                                 : sim_fail(ACL_ERROR_INVALID_PARAM, "not a key");
}

static aclError map_import(const struct key *key, void **out) {
    int fd;
    size_t size;
    aclError status = sim_open_backing(key->owner, key->fd, key->inode, &fd, &size);
    if (status != ACL_SUCCESS) {
        return status;
    }
    void *address = sim_reserve(size, SIM_PAGE_BYTES);
    if (address == NULL) {
        status = sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device addresses for %zu bytes", size);
    } else {
        status = sim_map(address, size, fd, 0, key->physical, SIM_IMPORTED);
    }
    close(fd);
    if (status != ACL_SUCCESS && address != NULL) {
        sim_release(address);
    }
    *out = address;
    return status;
}

SIM_API aclError aclrtIpcMemImportByKey(void **out, const char *key, uint64_t flags) {
    struct key parts;
    int physical;
    if (sim_current_device() == SIM_NO_DEVICE) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device set in this thread");
    }
    if (!read_key(key, &parts)) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "not a key");
    }
    aclError status = sim_check_import(parts.owner, parts.export, &physical);
    if (status != ACL_SUCCESS) {
        return status;
    }
    if (physical != sim_physical(sim_current_device()) &&
        (flags & ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS) == 0) {
        return sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "memory of device %d, imported without peer access", physical);
    }
    status = map_import(&parts, out);
    if (status != ACL_SUCCESS) {
        return status;
    }
    struct import *entry = sim_new(sizeof *entry);
    snprintf(entry->key, sizeof entry->key, "%s", key);
    entry->address = *out;
    pthread_mutex_lock(&lock);
    entry->next = imports;
    imports = entry;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

/* The importer gives its mapping back, the exporter its key; the exporter's memory stays. */
SIM_API aclError aclrtIpcMemClose(const char *key) {
    struct key parts;
    struct sim_mapping was;
    pthread_mutex_lock(&lock);
    struct import **place = &imports;
    while (*place != NULL && strcmp((*place)->key, key) != 0) {
        place = &(*place)->next;
    }
    struct import *found = *place;
    if (found != NULL) {
        *place = found->next;
    }
    pthread_mutex_unlock(&lock);
    if (found != NULL) {
        sim_unmap(found->address, SIM_IMPORTED, &was);
        sim_release(found->address);
        free(found);
        return ACL_SUCCESS;
    }
    if (read_key(key, &parts) && parts.owner == getpid()) {
        return ACL_SUCCESS;
    }
    return sim_fail(ACL_ERROR_INVALID_PARAM, "close: a key that this process neither exported nor imported");
}
