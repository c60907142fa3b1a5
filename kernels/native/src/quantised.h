// Values of 4 and 8 bits as they lie in memory and as products take them.
//
// A strip is 16 columns of the product. Its values lie in vectors of 64 bytes, a word a column: eight of 4 bits or four of
// 8 that are neighbours in the summed dimension. Products take them two by two, as bfloat16, which holds each exactly;
// scales and zero points follow once a group is summed.
#pragma once
#include <array>

#include <algorithm>

#include "api.h"
#include "tiles.h"

namespace VARIANT {

enum Format { INT4 = 1, INT8 = 2, FLOAT8 = 3, INTEGERS = 4, EXPANDED = 5 };  // the last: `Values` as they are

#if defined(USE_AVX512_BF16)
typedef u32x16 Values;  // of 16 columns: two bfloat16 each
#else
typedef Pair Values;  // of 16 columns: the even inputs, the odd ones
#endif

template <int FORMAT>
constexpr int64_t VECTOR_INPUTS = FORMAT == INT4 ? 8 : FORMAT == EXPANDED ? 2 : 4;  // of the summed dimension
template <int FORMAT>
constexpr int64_t VECTOR_BYTES = FORMAT == EXPANDED ? sizeof(Values) : 64;

#if defined(USE_AVX512_BF16)
// What `expand` makes of an int8 is more by this: with it a value and its complement differ in the sign alone, and 128
// of them fill a table. Float8 needs another table, and no other code.
constexpr float INT8_EXCESS = 0.5f;

// A positive number of 8 bits times 2^exponent as bfloat16.
constexpr uint16_t bfloat16_of(int number, int exponent) {
    if (number == 0) return 0;
    int top = 7;
    while (!(number >> top & 1)) top--;
    return uint16_t((127 + top + exponent) << 7 | ((number << (7 - top)) & 0x7f));
}

struct ByteTable {  // of the values without sign of a format: their bfloat16's lower and upper halves
    std::array<uint8_t, 128> low, high;
};

constexpr ByteTable byte_table(bool is_float) {
    ByteTable table{};
    for (int i = 0; i < 128; i++) {
        uint16_t bits = bfloat16_of(2 * i + 1, -1);
        if (is_float) bits = i == 127 ? 0x7fc0 : i < 8 ? bfloat16_of(i, -9) : bfloat16_of(8 + i % 8, i / 8 - 10);
        table.low[i] = uint8_t(bits);
        table.high[i] = uint8_t(bits >> 8);
    }
    return table;
}

constexpr std::array<uint16_t, 32> nibble_table() {  // twice, since an index has 5 bits, of which one is a neighbour's
    std::array<uint16_t, 32> table{};
    for (int i = 0; i < 32; i++) {
        const int value = i % 16 - 8;
        table[i] = value < 0 ? 0x8000 | bfloat16_of(-value, 0) : bfloat16_of(value, 0);
    }
    return table;
}

alignas(64) inline constexpr std::array<uint16_t, 32> NIBBLES = nibble_table();
alignas(64) inline constexpr ByteTable BYTES[2] = {byte_table(false), byte_table(true)};

// Of 64 lower and 64 upper halves those of two words' first two or last two values.
constexpr std::array<uint8_t, 64> halves(int first) {
    std::array<uint8_t, 64> places{};
    for (int i = 0; i < 64; i++) places[i] = uint8_t(i / 4 * 4 + first + i % 4 / 2 + (i % 2 ? 64 : 0));
    return places;
}

alignas(64) inline constexpr std::array<uint8_t, 64> FIRST_HALVES = halves(0), LAST_HALVES = halves(2);

constexpr Format CODE_OF_FLOAT8 = INT8;

template <int FORMAT>
inline __attribute__((always_inline)) void expand(const uint8_t* from, Values* to, bool is_float8) {
    const __m512i codes = _mm512_loadu_si512(from);
    if constexpr (FORMAT == EXPANDED) {
        to[0] = (u32x16)codes;
    } else if constexpr (FORMAT == INT4) {
        const __m512i table = _mm512_load_si512(NIBBLES.data());
        to[0] = (u32x16)_mm512_permutexvar_epi16(codes, table);
        to[1] = (u32x16)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
        to[2] = (u32x16)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
        to[3] = (u32x16)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
    } else {
        const uint8_t* table = BYTES[is_float8].low.data();
        const auto look_up = [&](const uint8_t* half) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(half), codes, _mm512_load_si512(half + 64));
        };
        const __m512i low = look_up(table), signs = _mm512_set1_epi8(-128);
        const __m512i high = _mm512_ternarylogic_epi32(look_up(table + 128), codes, signs, 0xf8);  // a | b & c
        to[0] = (u32x16)_mm512_permutex2var_epi8(low, _mm512_load_si512(FIRST_HALVES.data()), high);
        to[1] = (u32x16)_mm512_permutex2var_epi8(low, _mm512_load_si512(LAST_HALVES.data()), high);
    }
}

inline Pair as_pair(u32x16 values) { return widen(values); }
#else
constexpr float INT8_EXCESS = 0.f;
constexpr Format CODE_OF_FLOAT8 = FLOAT8;

// Byte `index` of each word.
template <int FORMAT>
inline f32x16 value_of(u32x16 words, int index) {
    if constexpr (FORMAT == INT8) return __builtin_convertvector((i32x16)(words << (24 - 8 * index)) >> 24, f32x16);
    const u32x16 code = words >> (8 * index), magnitude = code & 0x7f;
    const f32x16 small = __builtin_convertvector((i32x16)magnitude, f32x16) * (1.f / 512);  // 2^-9
    const u32x16 large = (magnitude << 20) + (120u << 23);
    u32x16 bits = magnitude < 8 ? (u32x16)small : large;
    bits = magnitude == 0x7f ? u32x16{} + 0x7fc00000u : bits;
    return (f32x16)(bits | (code & 0x80) << 24);
}

template <int FORMAT>
inline __attribute__((always_inline)) void expand(const uint8_t* from, Values* to, bool) {
    if constexpr (FORMAT == EXPANDED) {
        to[0] = {read<f32x16>(from), read<f32x16>(from + 64)};
    } else if constexpr (FORMAT == INT4) {
        const u32x16 codes = read<u32x16>(from);
        const auto value = [&](int shift) {
            return __builtin_convertvector((i32x16)(codes >> shift & 15), f32x16) - 8.f;
        };
        for (int i = 0; i < 4; i++) to[i] = {value(4 * i), value(4 * i + 16)};
    } else {
        const u32x16 codes = read<u32x16>(from);
        for (int i = 0; i < 2; i++) to[i] = {value_of<FORMAT>(codes, 2 * i), value_of<FORMAT>(codes, 2 * i + 1)};
    }
}

inline Pair as_pair(Pair values) { return values; }
#endif

// 16 scales. type: 0 float32, 1 bfloat16, 2 float16.
inline f32x16 load_scales(const void* scales, int64_t at, int64_t type) {
    if (type == 0) return load((const float*)scales + at);
    if (type == 1) return load((const bf16*)scales + at);
    const u16x16 halves = read<u16x16>((const uint16_t*)scales + at);
#ifdef __AVX512F__
    return (f32x16)_mm512_cvtph_ps((__m256i)halves);
#else
    const u32x16 half = wide(halves), magnitude = half & 0x7fff;
    const f32x16 small = __builtin_convertvector((i32x16)magnitude, f32x16) * 5.96046448e-8f;  // 2^-24
    u32x16 bits = magnitude < 0x400 ? (u32x16)small : (magnitude << 13) + (112u << 23);
    bits = magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000u : bits;
    return (f32x16)(bits | (half & 0x8000) << 16);
#endif
}

inline f32x16 load_zeros(const void* zeros, int64_t at, bool is_signed) {
#ifdef __AVX512F__
    // GCC 12 converts bytes to floats one by one, which took a tenth of the time of products with zero points.
    const __m128i bytes = read<__m128i>((const uint8_t*)zeros + at);
    if (is_signed) return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) - 8.f;
#else
    typedef uint8_t u8x16 __attribute__((vector_size(16)));
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    const u8x16 bytes = read<u8x16>((const uint8_t*)zeros + at);
    return is_signed ? __builtin_convertvector((i8x16)bytes, f32x16) : __builtin_convertvector(bytes, f32x16) - 8.f;
#endif
}

inline void pack_quantised(const PackArgs& args) {
    const bool is_nibbles = args.format == INT4;
    const int64_t per_word = is_nibbles ? 8 : 4, row_bytes = is_nibbles ? args.k / 2 : args.k;
    const int64_t step = args.format == INTEGERS ? 64 : 32, depth = (args.k + step - 1) / step * step;
    const int64_t words = depth / per_word, strips = (args.n + 31) / 32 * 2;
#pragma omp parallel for
    for (int64_t strip = 0; strip < strips; strip++) {
        uint32_t* out = (uint32_t*)args.packed + strip * words * 16;
        for (int64_t c = 0; c < 16; c++) {
            const int64_t column = strip * 16 + c;
            const uint8_t* from = (const uint8_t*)args.values + column * row_bytes;
            int32_t sum = 0;
            for (int64_t w = 0; w < words; w++) {
                uint8_t bytes[4] = {};
                const int64_t rest = column < args.n ? row_bytes - w * 4 : 0;
                for (int64_t i = 0; i < std::min<int64_t>(rest, 4); i++) bytes[i] = from[w * 4 + i];
                uint32_t word = 0;
                for (int i = 0; i < 4; i++) {
                    // Even inputs in the lower 16 bits, odd ones in the upper.
                    if (is_nibbles) word |= uint32_t(bytes[i] & 15) << 4 * i | uint32_t(bytes[i] >> 4) << (16 + 4 * i);
                    else word |= uint32_t(bytes[i]) << 8 * i;
                    sum += int8_t(bytes[i]);
                }
                if (args.format == INT8 && INT8_EXCESS != 0) word ^= (word >> 7 & 0x01010101u) * 0x7f;
                out[w * 16 + c] = word;
            }
            if (args.format == INTEGERS) args.column_sums[column] = sum;
        }
    }
}

}  // namespace VARIANT
