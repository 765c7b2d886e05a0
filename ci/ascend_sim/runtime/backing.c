/* The files that hold the bytes of device memory, and how much of each device this process has taken.
 *
 * Each allocation is an unnamed file in memory (memfd). Another process opens it through
 * /proc/PID/fd/FD, which works for the same user in the same pid namespace while the owner lives.
 * Simplified: what other processes take of the same device is not counted. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ascend_sim.h"

#define FILE_NAME "ascend_sim"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used[SIM_MAX_DEVICES];

size_t sim_memory_total(void) {
    return (size_t)sim_setting("ASCEND_SIM_MEM_MB", 4096) << 20;
}

size_t sim_memory_used(int physical) {
    pthread_mutex_lock(&lock);
    size_t bytes = used[physical];
    pthread_mutex_unlock(&lock);
    return bytes;
}

static bool take(int physical, size_t size) {
    const size_t total = sim_memory_total();
    pthread_mutex_lock(&lock);
    bool fits = size <= total && used[physical] <= total - size;
    if (fits) {
        used[physical] += size;
    }
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give_back(int physical, size_t size) {
    pthread_mutex_lock(&lock);
    used[physical] -= size;
    pthread_mutex_unlock(&lock);
}

aclError sim_new_backing(int physical, size_t size, int *fd) {
    if (!take(physical, size)) {
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                        "out of device memory: %zu more bytes, %zu used of %zu (ASCEND_SIM_MEM_MB)", size,
                        sim_memory_used(physical), sim_memory_total());
    }
    *fd = memfd_create(FILE_NAME, MFD_CLOEXEC);
    if (*fd >= 0 && ftruncate(*fd, (off_t)size) == 0) {
        return ACL_SUCCESS;
    }
    aclError status = sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no file for %zu bytes of device memory: %s",
                               size, strerror(errno));
    if (*fd >= 0) {
        close(*fd);
    }
    give_back(physical, size);
    return status;
}

/* Mappings of the file keep its bytes. */
void sim_close_backing(int physical, size_t size, int fd) {
    close(fd);
    give_back(physical, size);
}

ino_t sim_backing_inode(int fd) {
    struct stat about;
    return fstat(fd, &about) == 0 ? about.st_ino : 0;
}

/* The number of a file may by now belong to another file, that of a process to another process. */
aclError sim_open_backing(pid_t owner, int fd, ino_t inode, int *opened, size_t *size) {
    static const char expected[] = "/memfd:" FILE_NAME;
    char path[64];
    char target[64] = "";
    struct stat about;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)owner, fd);
    *opened = -1;
    if (readlink(path, target, sizeof target - 1) < 0) {
        return sim_fail(ACL_ERROR_RT_INVALID_HANDLE, "process %d has no shared memory %d: %s", (int)owner, fd,
                        strerror(errno));
    }
    if (strncmp(target, expected, sizeof expected - 1) == 0) {
        *opened = open(path, O_RDWR | O_CLOEXEC);
    }
    if (*opened >= 0 && fstat(*opened, &about) == 0 && (inode == 0 || about.st_ino == inode)) {
        *size = (size_t)about.st_size;
        return ACL_SUCCESS;
    }
    if (*opened >= 0) {
        close(*opened);
    }
    return sim_fail(ACL_ERROR_RT_INVALID_HANDLE, "process %d has freed its shared memory %d", (int)owner, fd);
}
