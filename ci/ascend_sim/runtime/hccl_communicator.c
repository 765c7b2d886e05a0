/* Communicators: how ranks find each other, and what a communicator says of itself.
 *
 * Ranks are processes, or threads, of one machine. Each listens on an abstract unix socket whose name comes
 * from the root's information, and calls the ranks below it; afterwards there is one socket per pair.
 * Nothing is reachable from outside the machine and no file stays behind. Not simulated: network
 * interfaces, device topology, buffers (HCCL_BUFFSIZE) and the configuration of a communicator. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hccl.h"

enum { RETRY_US = 2000, CONFIGURATION_CAPABILITY = 12 };

long sim_hccl_timeout_ms(void) {
    return sim_setting("ASCEND_SIM_HCCL_TIMEOUT_MS", 60000);
}

static socklen_t address_of(struct sockaddr_un *address, const char *name, uint32_t rank) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    /* A path that starts with a zero byte is abstract. */
    int length =
        snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "ascend-sim-%.80s-%u", name, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int new_socket(void) {
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

static int listen_as(const char *name, uint32_t rank) {
    struct sockaddr_un address;
    const socklen_t length = address_of(&address, name, rank);
    int listener = new_socket();
    if (listener < 0) {
        return -1;
    }
    if (bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, SIM_MAX_RANKS) != 0) {
        close(listener);
        return -1;
    }
    return listener;
}

/* The socket, or -1 when the rank is not there by then. */
static int call_rank(const struct communicator *communicator, uint32_t rank, long end_ms) {
    struct sockaddr_un address;
    const socklen_t length = address_of(&address, communicator->name, rank);
    int connection = new_socket();
    if (connection < 0) {
        return -1;
    }
    while (connect(connection, (struct sockaddr *)&address, length) != 0) {
        if (sim_now_ms() > end_ms) {
            close(connection);
            return -1;
        }
        usleep(RETRY_US);
    }
    const uint32_t me = communicator->rank;
    if (send(connection, &me, sizeof me, MSG_NOSIGNAL) != (ssize_t)sizeof me) {
        close(connection);
        return -1;
    }
    return connection;
}

static bool answer_one(struct communicator *communicator, int listener, long end_ms) {
    struct pollfd polled = {.fd = listener, .events = POLLIN};
    const long left_ms = end_ms - sim_now_ms();
    uint32_t caller;
    if (left_ms <= 0 || poll(&polled, 1, (int)left_ms) != 1) {
        return false;
    }
    int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (connection < 0) {
        return false;
    }
    if (recv(connection, &caller, sizeof caller, MSG_WAITALL) != (ssize_t)sizeof caller ||
        caller >= communicator->ranks || communicator->sockets[caller] >= 0) {
        close(connection);
        return false;
    }
    communicator->sockets[caller] = connection;
    return true;
}

static bool connect_ranks(struct communicator *communicator, int listener) {
    const long end_ms = sim_now_ms() + sim_hccl_timeout_ms();
    for (uint32_t rank = 0; rank < communicator->rank; rank++) {
        communicator->sockets[rank] = call_rank(communicator, rank, end_ms);
        if (communicator->sockets[rank] < 0) {
            return false;
        }
    }
    for (uint32_t rank = communicator->rank + 1; rank < communicator->ranks; rank++) {
        if (!answer_one(communicator, listener, end_ms)) {
            return false;
        }
    }
    return true;
}

void sim_use_communicator(struct communicator *communicator) {
    pthread_mutex_lock(&communicator->lock);
    communicator->users++;
    pthread_mutex_unlock(&communicator->lock);
}

void sim_drop_communicator(struct communicator *communicator) {
    pthread_mutex_lock(&communicator->lock);
    int users = --communicator->users;
    pthread_mutex_unlock(&communicator->lock);
    if (users > 0) {
        return;
    }
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        if (communicator->sockets[rank] >= 0) {
            close(communicator->sockets[rank]);
        }
    }
    free(communicator);
}

static HcclResult join(const char *name, uint32_t ranks, uint32_t rank, HcclComm *out) {
    if (ranks == 0 || ranks > SIM_MAX_RANKS || rank >= ranks) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "hccl: rank %u of %u (at most %d)", rank, ranks, SIM_MAX_RANKS);
        return HCCL_E_PARA;
    }
    struct communicator *communicator = sim_new(sizeof *communicator);
    snprintf(communicator->name, sizeof communicator->name, "%s", name);
    communicator->rank = rank;
    communicator->ranks = ranks;
    communicator->users = 1;
    pthread_mutex_init(&communicator->lock, NULL);
    for (uint32_t other = 0; other < ranks; other++) {
        communicator->sockets[other] = -1;
    }
    int listener = listen_as(name, rank);
    if (listener < 0) {
        sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "hccl %s: rank %u cannot listen: %s", name, rank, strerror(errno));
        sim_drop_communicator(communicator);
        return HCCL_E_SYSCALL;
    }
    bool joined = connect_ranks(communicator, listener);
    close(listener);
    if (!joined) {
        sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "hccl %s: rank %u of %u waited %ld ms for the others", name, rank,
                 ranks, sim_hccl_timeout_ms());
        sim_drop_communicator(communicator);
        return HCCL_E_TIMEOUT;
    }
    *out = communicator;
    return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetRootInfo(HcclRootInfo *root) {
    uint64_t random[2];
    memset(root, 0, sizeof *root);
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        return HCCL_E_SYSCALL;
    }
    snprintf(root->internal, sizeof root->internal, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    return HCCL_SUCCESS;
}

SIM_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *root, uint32_t rank, HcclComm *out) {
    return join(root->internal, ranks, rank, out);
}

SIM_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *root, uint32_t rank,
                                              UNUSED const void *configuration, HcclComm *out) {
    return join(root->internal, ranks, rank, out);
}

/* A process that is not of the new group passes no ranks and gets no communicator. */
SIM_API HcclResult HcclCreateSubCommConfig(HcclComm *communicator, uint32_t ranks, uint32_t *rank_ids,
                                           uint64_t id, uint32_t rank, UNUSED void *configuration, HcclComm *out) {
    const struct communicator *parent = *communicator;
    char name[COMM_NAME_MAX_LENGTH];
    if (rank_ids == NULL) {
        *out = NULL;
        return HCCL_SUCCESS;
    }
    if (ranks > parent->ranks || rank >= ranks || rank_ids[rank] != parent->rank) {
        sim_fail(ACL_ERROR_INVALID_PARAM, "hccl %s: rank %u is not number %u of a group of %u", parent->name,
                 parent->rank, rank, ranks);
        return HCCL_E_PARA;
    }
    snprintf(name, sizeof name, "%.48s-%llx", parent->name, (unsigned long long)id);
    return join(name, ranks, rank, out);
}

/* Work that is queued or running fails; the other ranks lose this one. */
SIM_API HcclResult HcclCommDestroy(HcclComm communicator) {
    pthread_mutex_lock(&communicator->lock);
    communicator->destroyed = true;
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        if (communicator->sockets[rank] >= 0) {
            shutdown(communicator->sockets[rank], SHUT_RDWR);
        }
    }
    pthread_mutex_unlock(&communicator->lock);
    sim_drop_communicator(communicator);
    return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetCommName(HcclComm communicator, char *name) {
    snprintf(name, COMM_NAME_MAX_LENGTH, "%s", communicator->name);
    return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetRankSize(HcclComm communicator, uint32_t *ranks) {
    *ranks = communicator->ranks;
    return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetRankId(HcclComm communicator, uint32_t *rank) {
    *rank = communicator->rank;
    return HCCL_SUCCESS;
}

/* Failures of work on streams. A peer that died is noticed by the next operation with it. */
SIM_API HcclResult HcclGetCommAsyncError(HcclComm communicator, HcclResult *result) {
    pthread_mutex_lock(&communicator->lock);
    *result = communicator->result;
    pthread_mutex_unlock(&communicator->lock);
    return HCCL_SUCCESS;
}

SIM_API const char *HcclGetErrorString(HcclResult result) {
    switch (result) {
    case HCCL_SUCCESS:
        return "no error";
    case HCCL_E_PARA:
        return "parameter error";
    case HCCL_E_NOT_SUPPORT:
        return "not supported";
    case HCCL_E_TIMEOUT:
        return "timeout";
    case HCCL_E_REMOTE:
        return "remote rank lost";
    default:
        return "simulated HCCL error";
    }
}

/* Bits of HcclCommConfig that torch_npu may fill in; all of them are ignored. */
SIM_API uint32_t HcclGetCommConfigCapability(void) {
    return CONFIGURATION_CAPABILITY;
}

SIM_API HcclResult HcclSetConfig(UNUSED int key, UNUSED int value) {
    return HCCL_SUCCESS;
}
