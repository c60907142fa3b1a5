// Vectors of 16 floats on every instruction set: loads and stores of bfloat16 and float32, exp, and a 16 x 16 transpose.
//
// GCC's vector extensions do the arithmetic, so that one source serves every variant; intrinsics stand only where the
// compiler's own choice was measured slower. VARIANT is the name of the instruction set this file is compiled for. It is
// also the namespace: the linker would otherwise merge inline functions of several variants into one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace VARIANT {

struct bf16 {
    uint16_t bits;
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));

constexpr int64_t LANES = 16;

template <class V>
inline V read(const void* from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void write(void* to, V value) {
    memcpy(to, &value, sizeof value);
}

inline f32x16 splat(float x) { return x - f32x16{}; }

inline u32x16 wide(u16x16 x) {
#ifdef __AVX512F__
    return (u32x16)_mm512_cvtepu16_epi32((__m256i)x);  // GCC 12 converts in two halves
#else
    return __builtin_convertvector(x, u32x16);
#endif
}

inline f32x16 widen(u16x16 x) { return (f32x16)(wide(x) << 16); }
inline float widen(bf16 x) { return widen(u16x16{x.bits})[0]; }
inline float widen(float x) { return x; }

// To the nearest bfloat16, ties to even. NaN stays NaN.
inline u16x16 narrow(f32x16 x) {
#ifdef USE_AVX512_BF16
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    const u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = x == x ? rounded : (bits >> 16 | 0x40);
#ifdef __AVX512F__
    return (u16x16)_mm512_cvtepi32_epi16((__m512i)rounded);
#else
    return __builtin_convertvector(rounded, u16x16);
#endif
#endif
}

inline f32x16 load(const float* from) { return read<f32x16>(from); }
inline f32x16 load(const bf16* from) { return widen(read<u16x16>(from)); }
inline void store(float* to, f32x16 x) { write(to, x); }
inline void store(bf16* to, f32x16 x) { write(to, narrow(x)); }

// The first n of 16 elements; the others are 0 when loaded and left alone when stored.
inline f32x16 load(const float* from, int64_t n) {
    if (n >= LANES) return load(from);
    f32x16 x = {};
    memcpy(&x, from, n * sizeof(float));
    return x;
}

inline f32x16 load(const bf16* from, int64_t n) {
    if (n >= LANES) return load(from);
    u16x16 x = {};
    memcpy(&x, from, n * sizeof(bf16));
    return widen(x);
}

inline void store(float* to, f32x16 x, int64_t n) {
    if (n >= LANES) return store(to, x);
    memcpy(to, &x, n * sizeof(float));
}

inline void store(bf16* to, f32x16 x, int64_t n) {
    if (n >= LANES) return store(to, x);
    const u16x16 bits = narrow(x);
    memcpy(to, &bits, n * sizeof(bf16));
}

// Calls f(first element, number of elements) for each vector of `size` elements; the last one may be short.
template <class F>
inline void for_vectors(int64_t size, F f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) f(i, LANES);
    if (i < size) f(i, size - i);
}

// As if stored in the type of the second argument and loaded again.
inline f32x16 rounded(f32x16 x, const float*) { return x; }
inline f32x16 rounded(f32x16 x, const bf16*) { return widen(narrow(x)); }

// 32 elements as two vectors: of float32 the first and the last 16; of bfloat16 those of even and those of odd index, which
// are there in one instruction each, and are rounded together.
struct Pair {
    f32x16 first, second;
};

inline Pair operator*(Pair a, Pair b) { return {a.first * b.first, a.second * b.second}; }
inline Pair operator*(Pair a, float b) { return {a.first * b, a.second * b}; }
inline Pair operator+(Pair a, Pair b) { return {a.first + b.first, a.second + b.second}; }
inline Pair operator-(Pair a, Pair b) { return {a.first - b.first, a.second - b.second}; }

inline Pair widen(u32x16 words) { return {(f32x16)(words << 16), (f32x16)(words & 0xffff0000u)}; }

inline u32x16 narrow(Pair x) {
#ifdef USE_AVX512_BF16
    const u16x32 halves = (u16x32)_mm512_cvtne2ps_pbh((__m512)x.second, (__m512)x.first);
    return (u32x16)__builtin_shufflevector(halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9,
                                           25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
    const auto to_nearest = [](f32x16 v) {
        const u32x16 bits = (u32x16)v;
        return v == v ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
    };
    return to_nearest(x.first) >> 16 | (to_nearest(x.second) & 0xffff0000u);
#endif
}

inline Pair load_pair(const float* from) { return {load(from), load(from + LANES)}; }
inline Pair load_pair(const bf16* from) { return widen(read<u32x16>(from)); }
inline void store_pair(float* to, Pair x) { store(to, x.first), store(to + LANES, x.second); }
inline void store_pair(bf16* to, Pair x) { write(to, narrow(x)); }
inline Pair rounded(Pair x, const float*) { return x; }
inline Pair rounded(Pair x, const bf16*) { return widen(narrow(x)); }

// 32 float32 in the order of a pair of T's.
inline Pair in_pair_order(const float* from, const float*) { return load_pair(from); }
inline Pair in_pair_order(const float* from, const bf16*) {
    const f32x16 a = load(from), b = load(from + LANES);
    return {__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
            __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

// Calls pair(first element) for each 32 of `size` elements, then f(first element, number of elements) for the vectors of
// the rest.
template <class P, class F>
inline void for_pairs(int64_t size, P pair, F f) {
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) pair(i);
    for_vectors(size - i, [&](int64_t rest, int64_t n) { f(i + rest, n); });
}

// b where either is NaN.
#ifdef __AVX512F__
inline f32x16 max(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
inline f32x16 min(f32x16 a, f32x16 b) { return (f32x16)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }
#endif

// f over all elements: halves, then quarters and so on of the vector change places.
template <class F>
inline float reduce(f32x16 x, F f) {
    x = f(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = f(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = f(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return f(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))[0];
}

inline float sum(f32x16 x) {
    return reduce(x, [](f32x16 a, f32x16 b) { return a + b; });
}

inline float largest(f32x16 x) { return reduce(x, max); }

// e^x, relative error 2e-7, for x from MIN_EXPONENT to MAX_EXPONENT; at the lower end it is 0 or less than 1e-37. NaN gives
// NaN.
#ifdef __AVX512F__
constexpr float MIN_EXPONENT = -110, MAX_EXPONENT = 87;

inline f32x16 exp_between(f32x16 x) {
    const f32x16 log2_e = splat(1.44269502f);  // less 1.9e-8
    const f32x16 n = (f32x16)_mm512_roundscale_ps((__m512)(x * log2_e), 8);  // to the nearest integer
    const f32x16 r = (f32x16)_mm512_fmsub_ps((__m512)x, (__m512)log2_e, (__m512)n) + x * 1.92596299e-8f;
    f32x16 p = splat(1.32647273e-3f);
    p = p * r + 9.67151299e-3f;
    p = p * r + 5.55073359e-2f;
    p = p * r + 2.40222424e-1f;
    p = p * r + 6.93147004e-1f;
    p = p * r + 1.f;
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);  // p * 2^n
}
#else
constexpr float MIN_EXPONENT = -87, MAX_EXPONENT = 87;

inline f32x16 exp_between(f32x16 x) {
    const f32x16 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 shifted = x * 1.44269504f + magic;
    const f32x16 n = shifted - magic;
    const f32x16 r = x - n * 0.693359375f + n * 2.12194440e-4f;  // x - n ln 2, in two parts
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return p * (f32x16)(((u32x16)shifted << 23) + 0x3f800000);  // times 2^n
}
#endif

// x / (1 + e^-x).
inline f32x16 silu(f32x16 x, const float*) {
    const f32x16 divisor = exp_between(min(splat(MAX_EXPONENT), max(splat(MIN_EXPONENT), -x))) + 1.f;
#ifdef __AVX512F__
    // A division takes as long as ten products: its estimate, within 2^-14, is made better once.
    const f32x16 inverse = (f32x16)_mm512_rcp14_ps((__m512)divisor);
    return x * (inverse * (2.f - divisor * inverse));
#else
    return x / divisor;
#endif
}

// The same of values that are then rounded to bfloat16: relative error 4e-6.
inline f32x16 silu(f32x16 x, const bf16*) {
#ifdef __AVX512F__
    // e^-x = 2^t; the inverse of more than 2^125 would be subnormal.
    const f32x16 t = min(splat(125.f), x * -1.44269504f);
    const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)t, 9);  // what is above the next lower integer
    f32x16 p = splat(1.3534168e-2f);
    p = p * r + 5.20114614e-2f;
    p = p * r + 2.41442756e-1f;
    p = p * r + 6.93003835e-1f;
    p = p * r + 1.00000259f;
    const f32x16 divisor = (f32x16)_mm512_scalef_ps((__m512)p, (__m512)t) + 1.f;  // scalef rounds t down by itself
    const f32x16 inverse = (f32x16)_mm512_rcp14_ps((__m512)divisor);
    return x * (inverse * (2.f - divisor * inverse));
#else
    return silu(x, static_cast<const float*>(nullptr));
#endif
}

// Rows of 16 words become columns, in place.
inline void transpose(u32x16* x) {
#if defined(__GNUC__) && !defined(__clang__)
    const u32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int w = 1; w < 16; w *= 2) {  // swap the off-diagonal quarters of each square of 2 w
        const u32x16 low = (lane & w) ? lane - w + 16 : lane;
        const u32x16 high = (lane & w) ? lane + 16 : lane + w;
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            if (r & w) continue;
            const u32x16 a = x[r], b = x[r + w];
            x[r] = __builtin_shuffle(a, b, low);
            x[r + w] = __builtin_shuffle(a, b, high);
        }
    }
#else
    for (int r = 0; r < 16; r++) {
        for (int c = 0; c < r; c++) {
            const uint32_t word = x[r][c];
            x[r][c] = x[c][r];
            x[c][r] = word;
        }
    }
#endif
}

}  // namespace VARIANT
