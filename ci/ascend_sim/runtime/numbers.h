/* bfloat16, which C does not have. */
#ifndef ASCEND_SIM_NUMBERS_H
#define ASCEND_SIM_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float bfloat16_to_float(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Rounds to the nearest, ties to even. */
static inline uint16_t float_to_bfloat16(float value) {
    const uint16_t quiet_nan = 0x7fc0;
    uint32_t bits;
    if (isnan(value)) {
        return quiet_nan;
    }
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
