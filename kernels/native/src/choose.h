// Chooses tokens: the most likely, and one drawn by Gumbel-max, kernels/gumbel_noise.py to the bit.
//
// For a draw the scores of 16 tokens are bounded first, by a fifth of the instructions of one; a token's own is computed
// where its bound is not below the best so far, some ten times a row.
#pragma once
#include "noise.h"
#include "truncate.h"

namespace VARIANT {

inline bool has_any(i32x16 is_so) {
    int32_t any = 0;
    for (int64_t lane = 0; lane < LANES; lane++) any |= is_so[lane];
    return any;
}

// Which of 16 bytes, of which the first n are read, are not 0.
inline i32x16 known(const uint8_t* bytes, int64_t n) {
    u8x16 found = {};
    memcpy(&found, bytes, std::min(n, LANES));
#ifdef __AVX512F__
    return (i32x16)_mm512_cvtepu8_epi32((__m128i)found) != 0;  // GCC 12 converts in four quarters
#else
    return __builtin_convertvector(found, i32x16) != 0;
#endif
}

struct Best {
    int64_t id;
    bool is_sound;  // no element is NaN or infinity, known or not, and a known one is above minus infinity
};

// The first of several maxima of the known elements; a NaN, known or not, counts as the largest, as in torch.argmax.
template <class T>
inline Best best_of_row(const T* x, const uint8_t* is_known, int64_t width) {
    constexpr int64_t BLOCK = 1024;  // the largest value is sought block by block, its place in one block alone
    constexpr float INF = std::numeric_limits<float>::infinity();
    float top = -INF;
    int64_t best = 0;
    i32x16 is_infinite = {};
    for (int64_t from = 0; from < width; from += BLOCK) {
        const int64_t size = std::min(BLOCK, width - from);
        f32x16 largest = splat(top);
        i32x16 is_nan = {};
        for_vectors(size, [&](int64_t i, int64_t n) {
            f32x16 v = load(x + from + i, n);
            is_nan |= v != v;
            is_infinite |= v == splat(INF);
            if (is_known) v = known(is_known + from + i, n) ? v : splat(-INF);
            largest = max(padded(v, n, -INF), largest);
        });
        if (has_any(is_nan)) {
            for (int64_t i = from;; i++)
                if (widen(x[i]) != widen(x[i])) return {i, false};
        }
        float block_top = top;
        for (int64_t lane = 0; lane < LANES; lane++) block_top = std::max(block_top, largest[lane]);
        if (block_top > top) {
            top = block_top;
            for (best = from; widen(x[best]) != top || (is_known && !is_known[best]);) best++;
        }
    }
    return {best, top > -INF && !has_any(is_infinite)};
}

constexpr uint32_t MIX_FIRST = 0x7feb352d, MIX_SECOND = 0x846ca68b, TOKEN_STEP = 0x9e3779b1;
constexpr uint32_t KEY_START_FIRST = 0x9e3779b9, KEY_START_SECOND = 0x243f6a88;
constexpr float MAX_NOISE = 22.19f;

template <class U>
inline U mix(U x) {
    x = (x ^ (x >> 16)) * MIX_FIRST;
    x = (x ^ (x >> 15)) * MIX_SECOND;
    return x ^ (x >> 16);
}

struct DrawKeys {
    uint32_t first, second;

    static uint32_t key(uint32_t start, uint64_t seed, uint64_t position) {
        uint32_t key = mix(start + (uint32_t)seed);
        key = mix(key ^ (uint32_t)(seed >> 32));
        key = mix(key + (uint32_t)position);
        return mix(key ^ (uint32_t)(position >> 32));
    }

    DrawKeys(uint64_t seed, uint64_t position)
        : first(key(KEY_START_FIRST, seed, position)), second(key(KEY_START_SECOND, seed, position)) {}

    template <class U>
    U bits(U tokens) const {
        return mix(mix(first + tokens * TOKEN_STEP) ^ second);
    }
};

inline f32x16 to_floats(u32x16 x) {  // below 2^31
#ifdef __AVX512F__
    return (f32x16)_mm512_cvtepi32_ps((__m512i)x);
#else
    return __builtin_convertvector((i32x16)x, f32x16);
#endif
}

// Above the noise of these bits, by 0.09 at most where that is above 3: -log(v) for -log(-log(1 - v)), and for log2 of a
// float its bits read as a number, a line from each power of two to the next. 1e-4 are for roundings, a score's too.
inline f32x16 noise_bound(u32x16 bits) {
    constexpr float LN2 = 0.693147181f;
    const f32x16 random = to_floats(bits >> 1) + 0.5f;  // 2^31 v
    return ((31 + 127) * LN2 + 1e-4f) - to_floats((u32x16)random) * (LN2 / (1 << 23));
}

// A row's logits less the largest, over the temperature, and its noise.
template <class T>
struct Scores {
    const T* logits;
    const uint8_t* is_known;  // null: all are
    float top;
    float temperature;
    DrawKeys keys;

    float of(int64_t token) const {
        return (widen(logits[token]) - top) / temperature + millrace_gumbel_noise(keys.bits((uint32_t)token));
    }

    // The same without what is dropped.
    Scores<float> truncated(int64_t row, const ChooseArgs& g) const {
        static thread_local Scratch<float> scores_of_thread;
        float* scores = scores_of_thread.reserve(g.width);
        for_vectors(g.width, [&](int64_t i, int64_t n) {
            f32x16 x = (load(logits + i, n) - top) / temperature;
            if (is_known) x = known(is_known + i, n) ? x : splat(LOWEST);
            store(scores + i, x, n);
        });
        truncate(scores, g.width, 0, g.truncation.of(row));
        return {scores, nullptr, 0, 1, keys};
    }

    // The token of the highest score, of equals the lowest; best: any known one, better a likely one.
    int64_t highest(int64_t width, int64_t best) const {
        constexpr float INF = std::numeric_limits<float>::infinity();
        const u32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const float factor = std::min(1 / temperature, 3e38f);  // times 0 it is 0
        float score = of(best);
        for_vectors(width, [&](int64_t i, int64_t n) {
            f32x16 x = (load(logits + i, n) - top) * factor;
            if (is_known) x = known(is_known + i, n) ? x : splat(-INF);
            x = padded(x, n, -INF);
            if (!at_least(x + MAX_NOISE, score)) return;
            const f32x16 bounds = x + noise_bound(keys.bits(lanes + (uint32_t)i));
            const uint32_t inside = (1u << n) - 1;  // the score so far may be minus infinity: its token may be dropped
            for (uint32_t open = at_least(bounds, score) & inside; open; open &= open - 1) {
                const int64_t token = i + __builtin_ctz(open);
                const float found = of(token);
                if (found > score || (found == score && token < best)) best = token, score = found;
            }
        });
        return best;
    }
};

template <class T>
void choose(const ChooseArgs& g) {
#pragma omp parallel for schedule(dynamic) if (g.rows * g.width >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < g.rows; r++) {
        const T* logits = (const T*)g.logits + r * g.stride;
        const Best best = best_of_row(logits, g.is_known, g.width);
        int64_t id = best.id;
        const float temperature = g.temperatures[r];
        if (best.is_sound && temperature != 0) {
            const DrawKeys keys(g.seeds[r], g.positions[r]);
            const Scores<T> scores = {logits, g.is_known, widen(logits[id]), temperature, keys};
            id = g.truncation.is_on(r, g.width) ? scores.truncated(r, g).highest(g.width, id) : scores.highest(g.width, id);
        }
        g.ids[r] = id;
        g.ids[g.rows + r] = best.is_sound ? id : -1;
    }
}

inline void truncate(const TruncateArgs& g) {
#pragma omp parallel for schedule(dynamic) if (g.rows * g.width >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < g.rows; r++) {
        if (!g.truncation.is_on(r, g.width)) continue;
        float* logits = g.logits + r * g.stride;
        const Best best = best_of_row(logits, nullptr, g.width);
        if (best.is_sound) truncate(logits, g.width, logits[best.id], g.truncation.of(r));
    }
}

}  // namespace VARIANT
