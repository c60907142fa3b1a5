// Products of 16 x 16 tiles: besides a few lines of vectors.h the only code that differs by instruction set.
//
// A tile of the left side is 16 rows of 64 bytes: 32 bfloat16 or 16 float32 of the summed dimension. A tile of the right
// side is 1 KiB: 16 rows of 16 columns of 4 bytes: one float32, or two bfloat16 or four integers that are neighbours in the
// summed dimension. The result is 16 x 16 float32 or, of integers (uint8 on the left, int8 on the right), int32 in their
// place.
#pragma once
#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace VARIANT {

template <class T>
constexpr int64_t PACK = 4 / sizeof(T);  // elements of the summed dimension in one word
template <class T>
constexpr int64_t STEP = LANES * PACK<T>;  // elements of the summed dimension in one tile
template <class T>
constexpr int64_t TILE = LANES * STEP<T>;  // elements of a tile

// 16 or 32 rows: tiles of the summed dimension one behind the other.
template <class T>
struct Left {
    const T* first;
    const T* second;  // the lower 16 rows; null: there are none
};

template <class T>
constexpr int64_t LINE = 64 / sizeof(T);  // elements of a line of the cache: one of the 16 rows of a right tile

// 16 or 32 columns: tiles of the summed dimension one behind the other. What the caller multiplies by next is fetched on
// the way, by blocks of five rows and more, `share` lines of either tile of columns at each step: a block of 8 multiplies by
// 64 KiB of a weight in 1 us (EPYC Zen 5), in which memory brings half as much.
template <class T>
struct Right {
    const T* first;
    const T* second;  // the right 16 columns; null: there are none
    const T* next_first = nullptr;
    const T* next_second = nullptr;
    int64_t share = 0;
    int64_t lines = 0;  // of either that are still to be fetched; else vectors fetch what these columns themselves need soon
    bool cold = false;  // nobody has fetched these columns: the first block of rows does, not what comes next
    int64_t jump = 0;   // elements from the end of these tiles to those that come next

    bool shares() const { return lines > 0 && !cold; }

    // To what the next block of rows fetches, after one that fetched its share at `steps` steps.
    void advance(int64_t steps) {
        next_first += steps * share * LINE<T>, next_second += steps * share * LINE<T>, lines -= steps * share;
    }
};

#ifdef USE_AMX
#ifdef EMULATE_TILES
// The same code where there are no units, for tests: tiles are plain arrays.
alignas(64) static thread_local uint8_t tile_bytes[8][16][64];

inline void tile_zero(int tile) { memset(tile_bytes[tile], 0, sizeof tile_bytes[tile]); }

inline void tile_load(int tile, const void* from, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(tile_bytes[tile][r], (const char*)from + r * stride, 64);
}

inline void tile_store(int tile, void* to, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char*)to + r * stride, tile_bytes[tile][r], 64);
}

// The unit takes results and operands that are subnormal as 0 and adds even elements before odd ones.
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }

inline void tile_dot(int c, int a, int b) {
    auto element = [](const uint8_t* row, int index) {
        uint16_t bits;
        memcpy(&bits, row + 2 * index, sizeof bits);
        const uint32_t word = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &word, sizeof value);
        return flushed(value);
    };
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 16; n++) {
            float even = read<float>(tile_bytes[c][m] + 4 * n), odd = 0;
            for (int k = 0; k < 16; k++) {
                even = flushed(std::fma(element(tile_bytes[a][m], 2 * k), element(tile_bytes[b][k], 2 * n), even));
                odd = flushed(std::fma(element(tile_bytes[a][m], 2 * k + 1), element(tile_bytes[b][k], 2 * n + 1), odd));
            }
            write(tile_bytes[c][m] + 4 * n, flushed(even + odd));
        }
    }
}

inline void tile_dot_integers(int c, int a, int b) {
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 16; n++) {
            int32_t sum = read<int32_t>(tile_bytes[c][m] + 4 * n);
            for (int k = 0; k < 64; k++) sum += tile_bytes[a][m][k] * int8_t(tile_bytes[b][k / 4][4 * n + k % 4]);
            write(tile_bytes[c][m] + 4 * n, sum);
        }
    }
}

struct Tiles {};
#define TILE_ZERO tile_zero
#define TILE_LOAD tile_load
#define TILE_STORE tile_store
#define TILE_DOT_FLOATS tile_dot
#define TILE_DOT_INTEGERS tile_dot_integers
#else
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT_FLOATS(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_DOT_INTEGERS(c, a, b) _tile_dpbusd(c, a, b)

struct Tiles {  // one in each thread that multiplies, for as long as it does
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};
#endif

#define TILE_DOT(c, a, b)                                     \
    do {                                                      \
        if constexpr (sizeof(T) == 1) TILE_DOT_INTEGERS(c, a, b); \
        else TILE_DOT_FLOATS(c, a, b);                        \
    } while (0)

// Tiles 0 to 3 are the result, 4 and 5 the left side, 6 and 7 the right one.
template <class T, int ROW_TILES, int COLUMN_TILES>
inline void multiply_tiles(Left<T> a, Right<T> b, int64_t steps, float* c, int64_t ldc, bool add) {
    constexpr bool LOWER = ROW_TILES > 1, RIGHT = COLUMN_TILES > 1;
    const int64_t share = b.shares() ? b.share : 0;
    float* lower = c + 16 * ldc;
    if (add) {
        TILE_LOAD(0, c, ldc * 4);
        if constexpr (RIGHT) TILE_LOAD(1, c + 16, ldc * 4);
        if constexpr (LOWER) TILE_LOAD(2, lower, ldc * 4);
        if constexpr (LOWER && RIGHT) TILE_LOAD(3, lower + 16, ldc * 4);
    } else {
        TILE_ZERO(0);
        if constexpr (RIGHT) TILE_ZERO(1);
        if constexpr (LOWER) TILE_ZERO(2);
        if constexpr (LOWER && RIGHT) TILE_ZERO(3);
    }
    for (int64_t s = 0; s < steps; s++) {
        for (int64_t line = s * share; line < (s + 1) * share; line++) {
            __builtin_prefetch(b.next_first + line * LINE<T>, 0, 2);
            __builtin_prefetch(b.next_second + line * LINE<T>, 0, 2);
        }
        TILE_LOAD(6, b.first + s * TILE<T>, 64);
        TILE_LOAD(4, a.first + s * TILE<T>, 64);
        TILE_DOT(0, 4, 6);
        if constexpr (RIGHT) {
            TILE_LOAD(7, b.second + s * TILE<T>, 64);
            TILE_DOT(1, 4, 7);
        }
        if constexpr (LOWER) {
            TILE_LOAD(5, a.second + s * TILE<T>, 64);
            TILE_DOT(2, 5, 6);
        }
        if constexpr (LOWER && RIGHT) TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, c, ldc * 4);
    if constexpr (RIGHT) TILE_STORE(1, c + 16, ldc * 4);
    if constexpr (LOWER) TILE_STORE(2, lower, ldc * 4);
    if constexpr (LOWER && RIGHT) TILE_STORE(3, lower + 16, ldc * 4);
}

template <class T>
inline void tile_product(Left<T> a, Right<T> b, int64_t steps, float* c, int64_t ldc, bool add) {
    if (a.second && b.second) return multiply_tiles<T, 2, 2>(a, b, steps, c, ldc, add);
    if (a.second) return multiply_tiles<T, 2, 1>(a, b, steps, c, ldc, add);
    if (b.second) return multiply_tiles<T, 1, 2>(a, b, steps, c, ldc, add);
    multiply_tiles<T, 1, 1>(a, b, steps, c, ldc, add);
}
#else
struct Tiles {};
#endif

// Sums that fit into the registers: rows of the left side times vectors of 16 columns of the right one.
#ifdef __AVX512F__
constexpr int BLOCK_ROWS = 8, BLOCK_COLUMNS = 2;
#else
constexpr int BLOCK_ROWS = 4, BLOCK_COLUMNS = 1;
#endif
constexpr int MIN_SHARING_ROWS = 5;  // a block of fewer rows waits for its own columns

// int32 sums += four uint8 of `left` times four int8 of each word of `right`.
inline u32x16 dot_integers(u32x16 sums, uint32_t left, u32x16 right) {
#if defined(__AVX512VNNI__)
    return (u32x16)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(left), (__m512i)right);
#else
    const uint32_t even = left & 0xff00ff, odd = left >> 8 & 0xff00ff;  // as pairs of 16 bits
#if defined(__AVX512BW__)
    const __m512i w = (__m512i)right, evens = _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), odds = _mm512_srai_epi16(w, 8);
    sums += (u32x16)_mm512_madd_epi16(evens, _mm512_set1_epi32(even));
    return sums + (u32x16)_mm512_madd_epi16(odds, _mm512_set1_epi32(odd));
#elif defined(__AVX2__)
    __m256i halves[2];
    memcpy(halves, &right, sizeof halves);
    for (__m256i& w : halves) {
        const __m256i evens = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), odds = _mm256_srai_epi16(w, 8);
        w = _mm256_add_epi32(_mm256_madd_epi16(evens, _mm256_set1_epi32(even)),
                             _mm256_madd_epi16(odds, _mm256_set1_epi32(odd)));
    }
    return sums + read<u32x16>(halves);
#else
    const i32x16 w = (i32x16)right;
    sums += (u32x16)((w << 24) >> 24) * (even & 0xff) + (u32x16)((w << 8) >> 24) * (even >> 16);
    return sums + (u32x16)((w << 16) >> 24) * (odd & 0xff) + (u32x16)(w >> 24) * (odd >> 16);
#endif
#endif
}

// sum += left * right, where left is one word in every lane. Of uint8 the sums are int32 in the place of float32.
template <class T>
inline f32x16 dot(f32x16 sum, uint32_t left, u32x16 right) {
    if constexpr (PACK<T> == 4) {
        return (f32x16)dot_integers((u32x16)sum, left, right);
    } else if constexpr (PACK<T> == 1) {
        return sum + (f32x16)(u32x16{} + left) * (f32x16)right;
    } else {
#ifdef USE_AVX512_BF16
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(left), (__m512bh)right);
#else
        sum += (f32x16)(u32x16{} + (left << 16)) * (f32x16)(right << 16);
        return sum + (f32x16)(u32x16{} + (left & 0xffff0000u)) * (f32x16)(right & 0xffff0000u);
#endif
    }
}

// ROWS rows times 16 or 32 columns. SHARES: see Right.
template <class T, int ROWS, int COLUMNS, bool SHARES>
inline void vector_block(Left<T> a, const Right<T>& b, int64_t steps, float* c, int64_t ldc, bool add) {
    // Few rows wait for the weight, which the CPU by itself fetches no further than to the end of a page. More rows take
    // longer with each line of it. Two to four take lines so fast that a CPU whose queue of fetches is full drops some: those
    // are asked for twice.
    constexpr int64_t NEAR = (ROWS > 4 ? 4096 : 2048) / sizeof(T), FAR = 4096 / sizeof(T);
    constexpr bool TWICE = ROWS > 1 && ROWS <= 4;
    f32x16 sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) sums[r][j] = add ? load(c + r * ldc + j * 16) : f32x16{};
    }
    for (int64_t s = 0; s < steps; s++) {
        const T* left = a.first + s * TILE<T>;
        const auto ahead = [&](int64_t by) { return by + (s * TILE<T> + by < steps * TILE<T> ? 0 : b.jump); };
        const int64_t near = ahead(NEAR), far = ahead(FAR);
        for (int64_t k = 0; k < 16; k++) {
            const int64_t at = s * TILE<T> + k * LINE<T>;
            if constexpr (SHARES) {
                const int64_t line = (s * b.share + (k * b.share >> 4)) * LINE<T>;
                __builtin_prefetch(b.next_first + line, 0, 2);
                if constexpr (COLUMNS > 1) __builtin_prefetch(b.next_second + line, 0, 2);
            } else {
                __builtin_prefetch(b.first + at + near, 0, 2);
                if constexpr (COLUMNS > 1) __builtin_prefetch(b.second + at + near, 0, 2);
                if constexpr (TWICE) __builtin_prefetch(b.first + at + far, 0, 2);
                if constexpr (TWICE && COLUMNS > 1) __builtin_prefetch(b.second + at + far, 0, 2);
            }
            const u32x16 words[2] = {read<u32x16>(b.first + at),
                                     COLUMNS > 1 ? read<u32x16>(b.second + at) : u32x16{}};
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const uint32_t word = read<uint32_t>(left + r * STEP<T> + k * PACK<T>);
#pragma GCC unroll 2
                for (int j = 0; j < COLUMNS; j++) sums[r][j] = dot<T>(sums[r][j], word, words[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) store(c + r * ldc + j * 16, sums[r][j]);
    }
}

// `rows` rows, at most 16 (of the left side there are 16), in blocks; a row too many costs less than the weight once more.
template <class T, int COLUMNS>
inline void vector_rows(Left<T> a, Right<T>& b, int64_t steps, float* c, int64_t ldc, bool add, int64_t rows) {
    const auto block = [&](auto size) {
        constexpr int ROWS = decltype(size)::value;
        if (ROWS >= MIN_SHARING_ROWS && b.shares()) {
            vector_block<T, ROWS, COLUMNS, true>(a, b, steps, c, ldc, add);
            b.advance(steps);
        } else {
            vector_block<T, ROWS, COLUMNS, false>(a, b, steps, c, ldc, add);
            b.cold = false;
        }
        rows -= ROWS, a.first += ROWS * STEP<T>, c += ROWS * ldc;
    };
    while (rows >= BLOCK_ROWS - 1) block(std::integral_constant<int, BLOCK_ROWS>());
    if constexpr (BLOCK_ROWS > 4) {
        if (rows > 4) block(std::integral_constant<int, 6>());
        else if (rows > 2) block(std::integral_constant<int, 4>());
    }
    if (rows > 1) block(std::integral_constant<int, 2>());
    else if (rows > 0) block(std::integral_constant<int, 1>());
}

// Of so many rows the blocks that share in fetching what comes next.
template <class T>
inline int64_t sharing_blocks(int64_t rows) {
#ifdef USE_AMX
    if constexpr (sizeof(T) <= 2) return (rows + 31) / 32;
#endif
    if constexpr (BLOCK_ROWS < MIN_SHARING_ROWS) return 0;
    return rows / BLOCK_ROWS + (rows % BLOCK_ROWS >= MIN_SHARING_ROWS);
}

// c [rows, 16 or 32] = a b, or c += a b; c's rows are ldc apart. rows: those of a that count, at most 32 or, without a
// second tile, 16; others of c are computed or left alone.
template <class T>
inline void product(Left<T> a, Right<T>& b, int64_t steps, float* c, int64_t ldc, bool add, int64_t rows = 32) {
#ifdef USE_AMX
    if constexpr (sizeof(T) <= 2) {
        tile_product(a, b, steps, c, ldc, add);
        if (b.shares()) b.advance(steps);
        b.cold = false;
        return;
    }
#endif
    for (int i = 0; i < (a.second ? 2 : 1); i++) {
        const Left<T> half{i ? a.second : a.first, nullptr};
        const int64_t n = std::min<int64_t>(rows - 16 * i, 16);
        float* to = c + i * 16 * ldc;
        if (b.second && BLOCK_COLUMNS > 1) {
            vector_rows<T, BLOCK_COLUMNS>(half, b, steps, to, ldc, add, n);
        } else {
            Right<T> second{b.second, nullptr};
            vector_rows<T, 1>(half, b, steps, to, ldc, add, n);
            if (b.second) vector_rows<T, 1>(half, second, steps, to + 16, ldc, add, n);
        }
    }
}

template <class T>
inline void product(Left<T> a, Right<T>&& b, int64_t steps, float* c, int64_t ldc, bool add, int64_t rows = 32) {
    product<T>(a, b, steps, c, ldc, add, rows);
}

}  // namespace VARIANT
