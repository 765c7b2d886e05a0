/* Messages between ranks: all messages of one operation move at once, so no order in which two ranks call
 * their operations can lock them up.
 *
 * A message is a header, which says what its sender means, and its bytes. A receiver that expects
 * something else fails. HCCL does not compare and would hang or mix up data. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "hccl.h"

struct header {
    uint32_t operation;
    int32_t type;
    uint64_t size;
};

/* A message on its way. */
struct transfer {
    const struct message *message;
    int socket;
    struct header header; /* to be sent, or as received */
    size_t header_done;
    size_t done;
};

static struct header header_of(const struct message *message) {
    return (struct header){.operation = message->operation, .type = message->type, .size = message->size};
}

static bool is_finished(const struct transfer *transfer) {
    return transfer->header_done == sizeof transfer->header && transfer->done == transfer->message->size;
}

/* Messages in one direction of one socket follow each other. */
static bool has_turn(const struct transfer *transfers, size_t index) {
    const struct transfer *transfer = &transfers[index];
    if (is_finished(transfer)) {
        return false;
    }
    for (size_t i = 0; i < index; i++) {
        if (!is_finished(&transfers[i]) && transfers[i].socket == transfer->socket &&
            transfers[i].message->sending == transfer->message->sending) {
            return false;
        }
    }
    return true;
}

/* Bytes moved; 0: try again; -1: the other end is gone. */
static ssize_t move(const struct transfer *transfer, char *bytes, size_t size) {
    ssize_t moved;
    if (transfer->message->sending) {
        moved = send(transfer->socket, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
        moved = recv(transfer->socket, bytes, size, MSG_DONTWAIT);
        if (moved == 0) {
            return -1;
        }
    }
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    return moved;
}

static HcclResult check_header(const struct communicator *communicator, const struct transfer *transfer) {
    const struct header wanted = header_of(transfer->message);
    const struct header *got = &transfer->header;
    if (memcmp(got, &wanted, sizeof wanted) == 0) {
        return HCCL_SUCCESS;
    }
    sim_fail(ACL_ERROR_RT_INTERNAL_ERROR,
             "hccl %s: rank %u expects op %u type %d of %zu bytes from rank %u, which sent op %u type %d of %zu",
             communicator->name, communicator->rank, wanted.operation, wanted.type, transfer->message->size,
             transfer->message->peer, got->operation, got->type, (size_t)got->size);
    return HCCL_E_PARA;
}

static HcclResult lost(const struct communicator *communicator, const struct transfer *transfer) {
    sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "hccl %s: rank %u lost rank %u (op %u)", communicator->name,
             communicator->rank, transfer->message->peer, transfer->message->operation);
    return HCCL_E_REMOTE;
}

static HcclResult advance(const struct communicator *communicator, struct transfer *transfer) {
    if (transfer->header_done < sizeof transfer->header) {
        ssize_t moved = move(transfer, (char *)&transfer->header + transfer->header_done,
                             sizeof transfer->header - transfer->header_done);
        if (moved < 0) {
            return lost(communicator, transfer);
        }
        transfer->header_done += (size_t)moved;
        if (transfer->header_done < sizeof transfer->header) {
            return HCCL_SUCCESS;
        }
        HcclResult result = check_header(communicator, transfer);
        if (result != HCCL_SUCCESS) {
            return result;
        }
    }
    if (transfer->done < transfer->message->size) {
        ssize_t moved = move(transfer, (char *)transfer->message->bytes + transfer->done,
                             transfer->message->size - transfer->done);
        if (moved < 0) {
            return lost(communicator, transfer);
        }
        transfer->done += (size_t)moved;
    }
    return HCCL_SUCCESS;
}

static HcclResult wait_and_advance(const struct communicator *communicator, struct transfer *transfers,
                                   struct pollfd *polled, size_t count, long end_ms) {
    const struct transfer *waiting = NULL;
    for (size_t i = 0; i < count; i++) {
        const bool turn = has_turn(transfers, i);
        polled[i] = (struct pollfd){.fd = turn ? transfers[i].socket : -1,
                                    .events = transfers[i].message->sending ? POLLOUT : POLLIN};
        if (turn) {
            waiting = &transfers[i];
        }
    }
    const long left_ms = end_ms - sim_now_ms();
    if (left_ms <= 0) {
        sim_fail(ACL_ERROR_RT_INTERNAL_ERROR,
                 "hccl %s: rank %u waited %ld ms for rank %u (op %u, ASCEND_SIM_HCCL_TIMEOUT_MS)",
                 communicator->name, communicator->rank, sim_hccl_timeout_ms(), waiting->message->peer,
                 waiting->message->operation);
        return HCCL_E_TIMEOUT;
    }
    if (poll(polled, count, (int)left_ms) < 0 && errno != EINTR) {
        sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "hccl: poll: %s", strerror(errno));
        return HCCL_E_SYSCALL;
    }
    for (size_t i = 0; i < count; i++) {
        if (polled[i].revents != 0) {
            HcclResult result = advance(communicator, &transfers[i]);
            if (result != HCCL_SUCCESS) {
                return result;
            }
        }
    }
    return HCCL_SUCCESS;
}

/* All messages, or the first failure with its text in sim_message. */
HcclResult sim_exchange(const struct communicator *communicator, const struct message *messages, size_t count) {
    const long end_ms = sim_now_ms() + sim_hccl_timeout_ms();
    struct transfer *transfers = sim_new(count * sizeof *transfers + 1);
    struct pollfd *polled = sim_new(count * sizeof *polled + 1);
    HcclResult result = HCCL_SUCCESS;
    for (size_t i = 0; i < count; i++) {
        transfers[i].message = &messages[i];
        transfers[i].socket = communicator->sockets[messages[i].peer];
        if (messages[i].sending) {
            transfers[i].header = header_of(&messages[i]);
        }
    }
    for (size_t next = 0; result == HCCL_SUCCESS && next < count;) {
        if (is_finished(&transfers[next])) {
            next++;
        } else {
            result = wait_and_advance(communicator, transfers, polled, count, end_ms);
        }
    }
    free(transfers);
    free(polled);
    return result;
}
