/* What the files of the simulated Ascend runtime share.
 *
 * Functions called acl*, aclrt*, aclnn*, Hccl*, rt* and Msprof* are CANN's, under CANN's names. What is
 * called sim_* belongs to the simulation and is not exported; ascend_sim_* is exported for the double of
 * the operators. Functions that return aclError give ACL_SUCCESS (0) or a code of CANN, with a text that
 * aclGetRecentErrMsg returns in the same thread. */
#ifndef ASCEND_SIM_H
#define ASCEND_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"

#define SIM_API __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

enum {
    SIM_MAX_DEVICES = 16,
    SIM_NO_DEVICE = -1,
    SIM_MESSAGE_BYTES = 512, /* longest error text, with its end */
    SIM_FOREVER_MS = 600000, /* "wait for ever" ends after ten minutes, so that a test cannot hang */
};
#define SIM_PAGE_BYTES ((size_t)2 << 20) /* device memory is handed out in pages of 2 MiB, as on 910B */

typedef aclError (*sim_work)(void *argument); /* of a stream; the argument is a copy */

/* ---- errors.c */
aclError sim_fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *sim_message(void);            /* text of this thread's last failure */
void sim_take_message(const char *text);  /* a failure of another thread, reported in this one */
void *sim_new(size_t size);               /* zeroed; ends the process when the host has no memory left */

/* ---- settings.c */
long sim_setting(const char *name, long otherwise);
const char *sim_text_setting(const char *name, const char *otherwise);
long sim_now_ms(void);
struct timespec sim_deadline(long milliseconds); /* negative: SIM_FOREVER_MS; on CLOCK_REALTIME */

/* ---- device.c: devices have a number in this process and, as ASCEND_RT_VISIBLE_DEVICES maps it, a
 * physical one */
int sim_current_device(void);       /* of this thread, in this process's numbers; SIM_NO_DEVICE: none set */
void sim_become_thread_of(int device);
int sim_physical(int device);       /* SIM_NO_DEVICE: not a device of this process */
int sim_visible_as(int physical);   /* SIM_NO_DEVICE: this process does not see it */

/* ---- backing.c: the files that hold the bytes of device memory; devices are physical here */
size_t sim_memory_total(void);
size_t sim_memory_used(int physical); /* by this process */
aclError sim_new_backing(int physical, size_t size, int *fd);
void sim_close_backing(int physical, size_t size, int fd);
ino_t sim_backing_inode(int fd);
aclError sim_open_backing(pid_t owner, int fd, ino_t inode, int *opened, size_t *size); /* inode 0: any */

/* ---- exports.c: who may open memory that a process has exported; an export is a file of the exporter */
int sim_new_export(int physical, bool anybody); /* negative: none could be made */
aclError sim_allow_import(pid_t owner, int file, const int32_t *pids, size_t count);
aclError sim_check_import(pid_t owner, int file, int *physical); /* of this process */

/* ---- arena.c: device addresses, and where their bytes are */
enum sim_place { SIM_NOWHERE, SIM_HOST, SIM_DEVICE }; /* SIM_NOWHERE: device addresses without memory */
enum sim_mapping_kind { SIM_ALLOCATED, SIM_MAPPED, SIM_IMPORTED };
struct sim_mapping {
    uintptr_t address;
    size_t size;
    int fd;       /* closed with the mapping when it is SIM_ALLOCATED; else another's, or closed already */
    int physical; /* device */
    enum sim_mapping_kind kind;
    struct sim_mapping *next;
};
void *sim_reserve(size_t size, size_t alignment); /* NULL: no addresses left */
bool sim_release(void *address);                  /* false: not the start of a reservation, or in use */
aclError sim_map(void *address, size_t size, int fd, off_t offset, int physical, enum sim_mapping_kind kind);
bool sim_unmap(void *address, enum sim_mapping_kind kind, struct sim_mapping *was);
bool sim_find_mapping(const void *address, struct sim_mapping *found); /* the one that contains it */
enum sim_place sim_locate(const void *address, size_t size, void **bytes);

/* ---- capture.c: graphs; what is refused while one is captured spoils it */
struct sim_captured { /* an event's last recording, if that was captured */
    uint64_t capture; /* 0: it was not */
    int place;
    uint64_t calls;
};
bool sim_keep(aclrtStream stream, sim_work work, const void *argument, size_t size); /* false: not captured */
aclError sim_refuse_blocking(const char *what);
aclError sim_refuse_wait(aclrtStream stream);
aclError sim_refuse_captured(struct sim_captured event);
struct sim_captured sim_record_captured(aclrtStream stream);
aclError sim_wait_captured(aclrtStream stream, struct sim_captured event, bool *captured);

/* ---- host_memory.c */
bool sim_is_pinned(const void *address);

/* ---- streams.c */
aclError sim_enqueue(aclrtStream stream, sim_work work, const void *argument, size_t size);
aclError sim_synchronize(aclrtStream stream, long milliseconds);
aclError sim_running_stream_error(void); /* in a work function: the stream's failure so far, uncollected */

#endif
