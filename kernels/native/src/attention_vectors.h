// Vectors of 64 bytes as attention reads them: keys, values and queries by the word.
//
// A word is 32 bits: a float32, or two bfloat16 of neighbouring dimensions (of a key) or of neighbouring keys (of
// values). So a sum of products is one loop for both types, and with AVX512-BF16 one instruction does two products.
#pragma once
#include "tiles.h"

namespace VARIANT {

// Vectors of a head: the last one may be short.
template <class T>
constexpr int64_t vectors_of(int64_t dim) {
    return (dim + STEP<T> - 1) / STEP<T>;
}

// The first `count` words from `from` on, 0 in the place of the others: what lies behind them may be NaN, or no memory.
inline u32x16 read_words(const void* from, int64_t count) {
#ifdef __AVX512F__
    return (u32x16)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
#else
    u32x16 x = {};
    memcpy(&x, from, count * sizeof(uint32_t));
    return x;
#endif
}

// sums + a b, word by word, in float32. The last argument only names the type of what the words hold.
inline f32x16 multiply_add(f32x16 sums, u32x16 a, u32x16 b, const float*) { return sums + (f32x16)a * (f32x16)b; }

inline f32x16 multiply_add(f32x16 sums, u32x16 a, u32x16 b, const bf16*) {
#ifdef USE_AVX512_BF16
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    sums += (f32x16)(a << 16) * (f32x16)(b << 16);
    return sums + (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
#endif
}

// Values of two keys, dimension by dimension in one word. Each half holds 16 dimensions, in an order that `in_order`
// undoes: once a query instead of once a key. (Of float32 a word is a value as it is.)
struct ValuePairs {
    u32x16 first;
    u32x16 second;
};

inline ValuePairs pair_values(u32x16 a, u32x16 b) {
    const u16x32 x = (u16x32)a, y = (u16x32)b;
    // Halves of each 16 bytes: one instruction on every x86-64.
    return {(u32x16)__builtin_shufflevector(x, y, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17,
                                            49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59),
            (u32x16)__builtin_shufflevector(x, y, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52,
                                            21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63)};
}

// 32 sums as `pair_values` orders them -> in the order of the dimensions.
inline void in_order(f32x16& first, f32x16& second) {
    const f32x16 a = first, b = second;
    first = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    second = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}

// Of each 2 N elements: N sums of a's halves, then N sums of b's.
template <int N>
inline f32x16 add_halves(f32x16 a, f32x16 b) {
#define FROM(i, half) (((i) & ~(2 * N - 1)) + ((i) & (N - 1)) + (half) * N + (((i) & N) ? 16 : 0))
#define HALF(h)                                                                                                      \
    __builtin_shufflevector(a, b, FROM(0, h), FROM(1, h), FROM(2, h), FROM(3, h), FROM(4, h), FROM(5, h), FROM(6, h), \
                            FROM(7, h), FROM(8, h), FROM(9, h), FROM(10, h), FROM(11, h), FROM(12, h), FROM(13, h),   \
                            FROM(14, h), FROM(15, h))
    return HALF(0) + HALF(1);
#undef HALF
#undef FROM
}

// Element i of the result is the sum of the vector make(i): 16 vectors in 15 steps of `add_halves`. A vector is added
// as soon as its partner is there, so that 5 are alive, not 16. Partners come to lie half a vector apart: hence the
// reversed bits.
template <int FIRST, int COUNT, class Make>
inline __attribute__((always_inline)) auto sums_over(const Make& make) {
    if constexpr (COUNT == 1) {
        return make((FIRST & 1) << 3 | (FIRST & 2) << 1 | (FIRST & 4) >> 1 | (FIRST & 8) >> 3);
    } else {
        const auto a = sums_over<FIRST, COUNT / 2>(make);
        const auto b = sums_over<FIRST + COUNT / 2, COUNT / 2>(make);
        return add_halves<16 / COUNT>(a, b);
    }
}

// e^x of x <= 0. Below MIN_EXPONENT, where less than 1e-37 is left, 0 or that. NaN gives NaN.
inline f32x16 weight_of(f32x16 x) {
#ifdef __AVX512F__
    return exp_between(max(splat(MIN_EXPONENT), x));
#else
    return x < MIN_EXPONENT ? f32x16{} : exp_between(x);
#endif
}

// c tanh(s / c) for c > 0. Near 0, where 1 - e^-2x has lost digits, by its series: below 2 steps of float32 either way.
inline f32x16 capped(f32x16 s, float c) {
    const f32x16 x = s / c, xx = x * x;
    const f32x16 magnitude = x < 0.f ? -x : x;
    const f32x16 rest = weight_of(magnitude * -2.f);
    const f32x16 far = (1.f - rest) / (1.f + rest);
    const f32x16 near = magnitude + magnitude * xx * (-1.f / 3 + xx * (2.f / 15 + xx * (-17.f / 315 + xx * (62.f / 2835))));
    const f32x16 share = magnitude < 0.25f ? near : far;
    return (x < 0.f ? -share : share) * c;
}

}  // namespace VARIANT
