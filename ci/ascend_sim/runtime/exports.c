/* Who may open memory that a process has exported, and which device it is on.
 *
 * Of each export there is an unnamed file, which importers read through /proc/PID/fd/FD as they read the
 * memory. As CANN does, an import is refused to a process whose id the exporter has not set, unless the
 * export said that ids are not looked at. The file stays until the exporter ends. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ascend_sim.h"

enum { MAX_IMPORTERS = 32 };

struct export {
    int physical;
    bool anybody;
    size_t count;
    int32_t importers[MAX_IMPORTERS];
};

static aclError read_export(pid_t owner, int file, struct export *found) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)owner, file);
    int opened = open(path, O_RDONLY | O_CLOEXEC);
    bool whole = opened >= 0 && pread(opened, found, sizeof *found, 0) == (ssize_t)sizeof *found;
    if (opened >= 0) {
        close(opened);
    }
    return whole ? ACL_SUCCESS
                 : sim_fail(ACL_ERROR_RT_INVALID_HANDLE, "process %d has no such export, or has ended", (int)owner);
}

int sim_new_export(int physical, bool anybody) {
    const struct export fresh = {.physical = physical, .anybody = anybody};
    int file = memfd_create("ascend_sim_export", MFD_CLOEXEC);
    if (file >= 0 && pwrite(file, &fresh, sizeof fresh, 0) != (ssize_t)sizeof fresh) {
        close(file);
        return -1;
    }
    return file;
}

aclError sim_allow_import(pid_t owner, int file, const int32_t *pids, size_t count) {
    struct export found;
    if (owner != getpid()) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "only the exporter, process %d, sets who may import", (int)owner);
    }
    aclError status = read_export(owner, file, &found);
    if (status != ACL_SUCCESS) {
        return status;
    }
    if (count > MAX_IMPORTERS - found.count) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "%zu more importers: at most %d", count, MAX_IMPORTERS);
    }
    for (size_t i = 0; i < count; i++) {
        found.importers[found.count++] = pids[i];
    }
    return pwrite(file, &found, sizeof found, 0) == (ssize_t)sizeof found
               ? ACL_SUCCESS
               : sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no room for the importers of an export");
}

aclError sim_check_import(pid_t owner, int file, int *physical) {
    struct export found;
    aclError status = read_export(owner, file, &found);
    if (status != ACL_SUCCESS) {
        return status;
    }
    bool may = found.anybody;
    for (size_t i = 0; i < found.count; i++) {
        may = may || found.importers[i] == getpid();
    }
    if (!may) {
        return sim_fail(ACL_ERROR_INVALID_PARAM, "process %d may not import: process %d has not set its id",
                        (int)getpid(), (int)owner);
    }
    *physical = found.physical;
    return ACL_SUCCESS;
}
