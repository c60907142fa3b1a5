// The noise of kernels/gumbel_noise.py to the bit: compiled for all variants at once, without fused multiply-add.
#include "noise.h"

#include <cstring>

namespace {

constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -0x1.bd0106p-13f, SQRT2 = 0x1.6a09e6p+0f;
constexpr float COEFFICIENTS[] = {  // from the last to the first
    0x1.24da9ap-4f,  -0x1.d9f4d6p-4f, 0x1.dda7cep-4f,  -0x1.fc5b4cp-4f, 0x1.23d6b6p-3f,
    -0x1.555ed8p-3f, 0x1.999d50p-3f,  -0x1.fffff2p-3f, 0x1.555554p-2f,
};

float split(float x, float& exponent) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t mantissa_bits = (bits & 0x007fffff) | 0x3f800000;
    float mantissa;
    memcpy(&mantissa, &mantissa_bits, sizeof mantissa);
    const bool is_large = mantissa > SQRT2;
    exponent = (float)((int32_t)(bits >> 23) - 127 + is_large);
    return is_large ? mantissa * 0.5f : mantissa;
}

float series(float f, float exponent) {
    const float z = f * f;
    float p = 0;
    for (float coefficient : COEFFICIENTS) p = p * f + coefficient;
    float y = (f * z) * p;
    y = y + exponent * LN2_LOW;
    y = y - 0.5f * z;
    return (f + y) + exponent * LN2_HIGH;
}

}  // namespace

float millrace_gumbel_noise(uint32_t bits) {
    const float random = ((float)(int32_t)(bits >> 1) + 0.5f) * 0x1p-31f;
    const float v = random < 1 - 0x1p-24f ? random : 1 - 0x1p-24f;
    float exponent;
    float mantissa = split(1 - v, exponent);
    const float exponential = -series(exponent == 0 ? -v : mantissa - 1, exponent);
    mantissa = split(exponential, exponent);
    return -series(mantissa - 1, exponent);
}
