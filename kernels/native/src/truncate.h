// Cuts the tail of a row of scores: top-k, then top-p, then min-p, without sorting it.
//
// A score stays with all above it; of equals across the nucleus' edge those of the lowest ids stay. That score is sought
// among the few that may be it: with top-k above the k-th largest so far; without, above the average of what may be
// dropped, since what lies below it may be dropped together. A score's mass is exp of it; masses are summed in double.
#pragma once
#include <cfloat>

#include "rows.h"

namespace VARIANT {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Bit i: x[i] >= least.
inline uint32_t at_least(f32x16 x, float least) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ);
#else
    const i32x16 is_so = x >= splat(least);
    uint32_t found = 0;
    for (int64_t lane = 0; lane < LANES; lane++) found |= (uint32_t)(is_so[lane] & 1) << lane;
    return found;
#endif
}

// Writes the elements of x whose bit is set from `to` on, where there is room for 16. Returns where the next one goes.
inline float* compress(float* to, f32x16 x, uint32_t bits) {
#ifdef __AVX512F__
    store(to, (f32x16)_mm512_maskz_compress_ps(bits, (__m512)x));  // straight to memory it takes 100 cycles on Zen 4
    return to + __builtin_popcount(bits);
#else
    for (; bits; bits &= bits - 1) *to++ = x[__builtin_ctz(bits)];
    return to;
#endif
}

// x with another value behind its first n elements.
inline f32x16 padded(f32x16 x, int64_t n, float value) {
    for (int64_t lane = n; lane < LANES; lane++) x[lane] = value;
    return x;
}

inline double mass(const float* scores, int64_t size, float top) {
    typedef double f64x8 __attribute__((vector_size(64)));
    f64x8 total = {};
    for_vectors(size, [&](int64_t i, int64_t n) {
        const f32x16 x = padded(exp_between(max(splat(MIN_EXPONENT), load(scores + i, n) - top)), n, 0);
        total += __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), f64x8);
        total += __builtin_convertvector(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15), f64x8);
    });
    double sum = 0;
    for (int64_t lane = 0; lane < 8; lane++) sum += total[lane];
    return sum;
}

struct Range {
    float lowest, highest;

    Range(const float* x, int64_t size) {
        f32x16 least = splat(x[0]), most = least;
        for_vectors(size, [&](int64_t i, int64_t n) {
            const f32x16 v = padded(load(x + i, n), n, x[0]);
            least = min(v, least), most = max(v, most);
        });
        lowest = -largest(-least), highest = largest(most);
    }
};

// What stays: scores above `least`, and of those equal to it the ids up to `last`.
struct Kept {
    float least;
    int64_t last;
};

// A row's scores, the largest of them, and room for two rows more with 16 elements behind each.
struct Row {
    float* scores;
    int64_t width;
    float top;
    float* some;
    float* others;

    // Copies the scores of at least `least` to `some`. Returns how many they are.
    int64_t collect(float least) const {
        float* end = some;
        for_vectors(width, [&](int64_t i, int64_t n) {
            const f32x16 x = padded(load(scores + i, n), n, LOWEST);
            if (const uint32_t bits = at_least(x, least)) end = compress(end, x, bits);
        });
        return end - some;
    }

    // Narrows the first `count` of `some` down to the lowest that stays if the lowest are dropped which have at most this
    // weight together, and some around it, few or all equal. What of them may be dropped is left in `droppable`.
    template <class Weigh>
    int64_t narrow(int64_t count, double& droppable, Weigh weigh) {
        constexpr int64_t FEW = 64;
        for (Range range(some, count); count > FEW && range.lowest < range.highest; range = Range(some, count)) {
            const float middle = range.lowest / 2 + range.highest / 2;
            const float pivot = middle > range.lowest ? middle : range.highest;
            float *below = others, *above = some;  // where it was read before
            for_vectors(count, [&](int64_t i, int64_t n) {
                const f32x16 x = load(some + i, n);
                const uint32_t all = (1u << n) - 1, bits = at_least(x, pivot) & all;
                below = compress(below, x, ~bits & all), above = compress(above, x, bits);
            });
            const double of_below = weigh(others, below - others);
            if (of_below <= droppable) {
                droppable -= of_below, count = above - some;
            } else {
                count = below - others, std::swap(some, others);
            }
        }
        if (count <= FEW) std::sort(some, some + count);
        return count;
    }

    // The k-th largest of the first `count` of `some`.
    float kth_largest(int64_t k, int64_t count) {
        double droppable = count - k;
        count = narrow(count, droppable, [](const float*, int64_t size) { return double(size); });
        return some[std::min(count - 1, int64_t(droppable))];
    }

    // The k-th largest score; minus infinity where fewer are above that.
    float kth_largest(int64_t k) {
        int64_t count = 0;
        constexpr int64_t BLOCK = LANES * LANES;
        for (int64_t i = 0; i + BLOCK <= width; i += BLOCK, count += LANES) {
            // Not minus infinity: the middle to it would be it.
            f32x16 most = max(splat(-FLT_MAX), load(scores + i));
            for (int64_t j = LANES; j < BLOCK; j += LANES) most = max(load(scores + i + j), most);
            store(some + count, most);
        }
        // So many maxima of 16 scores each, so at least as many scores, and few more, are at least the k-th maximum.
        const float least = k <= count ? kth_largest(k, count) : LOWEST;
        count = collect(std::max(least, -FLT_MAX));
        return count < k ? LOWEST : kth_largest(k, count);
    }

    // Drops the lowest of the first `count` of `some`, of equals the highest ids, as long as they have at most this mass
    // together. One stays.
    Kept drop(double droppable, int64_t count) {
        count = narrow(count, droppable, [&](const float* x, int64_t size) { return mass(x, size, top); });
        int64_t dropped = 0;
        if (some[0] == some[count - 1]) {
            dropped = std::min<int64_t>(count - 1, droppable / mass(some, 1, top));
        } else {
            while (dropped < count - 1 && (droppable -= mass(some + dropped, 1, top)) >= 0) dropped++;
        }
        const float least = some[dropped];
        const auto equals = std::equal_range(some, some + count, least);
        int64_t staying = equals.second - some - dropped, last = width;
        if (equals.first < some + dropped)
            for (last = -1; staying; staying -= scores[last] == least) last++;
        return {least, last};
    }

    // The nucleus of the scores of `least` or more: what is dropped has at most 1 - top_p of their mass. To that half a
    // float32 step is added, since shares up to there round to it in a float32 sum: so 0.3 of 10 equal tokens are 3.
    Kept nucleus(float least, float top_p) {
        const float share = 1 - top_p;
        const double limit = (double(share) + double(std::nextafter(share, 2.f))) / 2;
        int64_t count = least > LOWEST ? collect(least) : 0;
        const double total = count ? mass(some, count, top) : mass(scores, width, top);
        double droppable = limit * total;
        if (!count) {
            const float average = std::log(float(droppable / width)) - 1e-3f;  // less, since it is rounded
            count = collect(std::nextafter(std::min(average, 0.f) + top, LOWEST));
            droppable -= total - mass(some, count, top);
        }
        return drop(droppable, count);
    }
};

// Sets what is dropped to minus infinity, in place. top: the largest score, which is finite; none is NaN.
inline void truncate(float* scores, int64_t width, float top, const Truncation::Limits& limits) {
    const auto [top_k, top_p, min_p] = limits;
    static thread_local Scratch<float> scratch_of_thread;
    float* some = scratch_of_thread.reserve(2 * (width + LANES));
    Row row = {scores, width, top, some, some + width + LANES};
    Kept kept = {top_k < width ? row.kth_largest(top_k) : LOWEST, width};
    if (top_p < 1) kept = row.nucleus(kept.least, top_p);
    const float least = min_p > 0 ? std::log(min_p) : LOWEST;
    for_vectors(width, [&](int64_t i, int64_t n) {
        const f32x16 x = load(scores + i, n);
        store(scores + i, x >= splat(kept.least) && x - top >= splat(least) ? x : splat(LOWEST), n);
    });
    for (int64_t id = kept.last + 1; id < width; id++)
        if (scores[id] == kept.least) scores[id] = LOWEST;
}

}  // namespace VARIANT
