/* Types of HCCL, and what the files of its simulation share.
 *
 * The types and values restate hccl_types.h of the torch_npu wheel, which compiles as C++ only; the
 * prototypes of the Hccl functions follow its hccl.h. Enumerations are passed as int. */
#ifndef ASCEND_SIM_HCCL_H
#define ASCEND_SIM_HCCL_H

#include <pthread.h>

#include "ascend_sim.h"

typedef int HcclResult;
enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_INTERNAL = 4,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_UNAVAIL = 7,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_RUNTIME = 15,
    HCCL_E_REMOTE = 21,
};

enum { HCCL_REDUCE_SUM = 0, HCCL_REDUCE_PROD = 1, HCCL_REDUCE_MAX = 2, HCCL_REDUCE_MIN = 3 };

enum {
    HCCL_INT8 = 0,
    HCCL_INT16 = 1,
    HCCL_INT32 = 2,
    HCCL_FP16 = 3,
    HCCL_FP32 = 4,
    HCCL_INT64 = 5,
    HCCL_UINT64 = 6,
    HCCL_UINT8 = 7,
    HCCL_UINT16 = 8,
    HCCL_UINT32 = 9,
    HCCL_FP64 = 10,
    HCCL_BFP16 = 11,
    HCCL_INT128 = 12,
    HCCL_HIF8 = 14,
    HCCL_FP8E4M3 = 15,
    HCCL_FP8E5M2 = 16,
    HCCL_FP8E8M0 = 17,
};

enum { HCCL_ROOT_INFO_BYTES = 4108, COMM_NAME_MAX_LENGTH = 128 };
typedef struct {
    char internal[HCCL_ROOT_INFO_BYTES];
} HcclRootInfo;

enum { HCCL_SEND = 0, HCCL_RECV = 1 };
typedef struct {
    int type;
    void *buf;
    uint64_t count;
    int dtype;
    uint32_t peer;
} HcclSendRecvItem;

enum { SIM_MAX_RANKS = 64 };

struct communicator {
    char name[COMM_NAME_MAX_LENGTH];
    uint32_t rank;
    uint32_t ranks;
    int sockets[SIM_MAX_RANKS]; /* one to each other rank; -1: this rank itself */
    pthread_mutex_t lock;
    int users; /* the handle, and work in queues */
    bool destroyed;
    aclError error; /* of the first failure: a communicator that failed stays failed */
    HcclResult result;
    char message[SIM_MESSAGE_BYTES];
};
typedef struct communicator *HcclComm;

/* Both ends of a message must mean the same operation. */
enum sim_operation {
    SIM_POINT_TO_POINT,
    SIM_BROADCAST,
    SIM_SCATTER,
    SIM_ALL_GATHER,
    SIM_ALL_REDUCE,
    SIM_REDUCE,
    SIM_REDUCE_SCATTER,
    SIM_ALL_TO_ALL,
    SIM_BARRIER,
};

/* One message to or from another rank. */
struct message {
    bool sending;
    uint32_t peer;
    enum sim_operation operation;
    int type; /* of the elements */
    void *bytes;
    size_t size;
};

/* One call of an operation. Addresses are the device's, sizes in bytes. */
struct hccl_job {
    struct communicator *communicator;
    enum sim_operation operation;
    int type; /* of the elements */
    int reduction;
    uint32_t root;
    size_t size; /* of one rank's part */
    void *source;
    size_t source_size; /* 0: this rank does not send from it */
    void *destination;
    size_t destination_size;
    struct message *messages; /* of SIM_POINT_TO_POINT and SIM_ALL_TO_ALL; owned */
    size_t message_count;
    void *own_source; /* SIM_ALL_TO_ALL: what this rank keeps for itself */
    void *own_destination;
    size_t own_size;
};

/* ---- hccl_communicator.c */
void sim_use_communicator(struct communicator *communicator);
void sim_drop_communicator(struct communicator *communicator);
long sim_hccl_timeout_ms(void);

/* ---- hccl_messages.c */
HcclResult sim_exchange(const struct communicator *communicator, const struct message *messages, size_t count);

/* ---- hccl_reduce.c */
size_t sim_hccl_type_size(int type); /* bytes; 0: no such type */
bool sim_can_reduce(int type, int operation);
void sim_reduce(void *into, const void *from, size_t count, int type, int operation);

/* ---- hccl_operations.c */
HcclResult sim_start_job(const struct hccl_job *job, aclrtStream stream); /* takes job->messages */

#endif
