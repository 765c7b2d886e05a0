/* Settings from the environment, and clocks. A setting is read when it is used, so a test can change it in
 * a running process, at a moment when no stream has work. README.md lists the settings. */
#include <stdlib.h>

#include "ascend_sim.h"

const char *sim_text_setting(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? text : otherwise;
}

long sim_setting(const char *name, long otherwise) {
    const char *text = sim_text_setting(name, NULL);
    return text != NULL ? strtol(text, NULL, 10) : otherwise;
}

long sim_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000L + now.tv_nsec / 1000000L;
}

struct timespec sim_deadline(long milliseconds) {
    const long nanoseconds_per_second = 1000000000L;
    struct timespec end;
    if (milliseconds < 0) {
        milliseconds = SIM_FOREVER_MS;
    }
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += milliseconds / 1000;
    end.tv_nsec += milliseconds % 1000 * 1000000L;
    if (end.tv_nsec >= nanoseconds_per_second) {
        end.tv_sec++;
        end.tv_nsec -= nanoseconds_per_second;
    }
    return end;
}
