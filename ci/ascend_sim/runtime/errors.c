/* Error texts and the log. CANN keeps the text of the last failure per thread; so does this file. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ascend_sim.h"

static _Thread_local char last_message[SIM_MESSAGE_BYTES];

static bool logging(void) {
    return getenv("ASCEND_SIM_LOG") != NULL;
}

aclError sim_fail(aclError code, const char *format, ...) {
    static const char prefix[] = "ascend_sim: ";
    const size_t room = sizeof last_message - (sizeof prefix - 1);
    va_list arguments;
    memcpy(last_message, prefix, sizeof prefix);
    va_start(arguments, format);
    vsnprintf(last_message + sizeof prefix - 1, room, format, arguments);
    va_end(arguments);
    if (logging()) {
        fprintf(stderr, "%s (error %d)\n", last_message, code);
    }
    return code;
}

const char *sim_message(void) {
    return last_message;
}

void sim_take_message(const char *text) {
    snprintf(last_message, sizeof last_message, "%s", text);
}

void *sim_new(size_t size) {
    void *memory = calloc(1, size);
    if (memory == NULL) {
        fprintf(stderr, "ascend_sim: the host has no %zu bytes left\n", size);
        abort();
    }
    return memory;
}

/* CANN also forgets the message when it is read; torch_npu reads it once per failure, so that is left out. */
SIM_API const char *aclGetRecentErrMsg(void) {
    return last_message;
}

SIM_API void aclAppLog(aclLogLevel level, UNUSED const char *function, const char *file, uint32_t line,
                       const char *format, ...) {
    if (level < ACL_ERROR || !logging()) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "[acl] %s:%u ", file, line);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}
