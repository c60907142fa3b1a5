// What lies between the products: one pass over memory each, rounded where kernels.cpu rounds.
#pragma once
#include <algorithm>
#include <limits>

#include "api.h"
#include "scratch.h"
#include "vectors.h"

namespace VARIANT {

// Fewer elements than this are not worth waking other threads for (some 5 us).
constexpr int64_t PARALLEL_ELEMENTS = 1 << 14;

// So far ahead a pass fetches what it reads: the CPU by itself goes no further than to the end of a page.
constexpr int64_t NORM_FETCHED_BYTES = 2048;  // 4096: 1.4 times as long
constexpr int64_t SILU_FETCHED_BYTES = 8192;

// Fetches `size` elements while others are worked on.
template <class T>
inline void fetch(const T* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

template <class T>
inline void fetch_pair(const T* from, int64_t bytes_ahead) {
    fetch(from + bytes_ahead / int64_t(sizeof(T)), 2 * LANES);
}

inline float inverse_rms(f32x16 squares, float eps, int64_t width) { return 1 / std::sqrt(sum(squares) / width + eps); }

template <class T>
inline float inverse_rms(const T* x, float eps, int64_t width) {
    Pair squares = {};
    for_pairs(
        width,
        [&](int64_t i) {
            fetch_pair(x + i, NORM_FETCHED_BYTES);
            const Pair v = load_pair(x + i);
            squares = squares + v * v;
        },
        [&](int64_t i, int64_t n) {
            const f32x16 v = load(x + i, n);
            squares.first += v * v;
        });
    return inverse_rms(squares.first + squares.second, eps, width);
}

// residual += x. Returns the inverse of the root mean square of the sum.
template <class T>
inline float add_to(T* residual, const T* x, float eps, int64_t width) {
    Pair squares = {};
    for_pairs(
        width,
        [&](int64_t i) {
            fetch_pair(x + i, NORM_FETCHED_BYTES), fetch_pair(residual + i, NORM_FETCHED_BYTES);
            const Pair v = rounded(load_pair(residual + i) + load_pair(x + i), x);
            store_pair(residual + i, v);
            squares = squares + v * v;
        },
        [&](int64_t i, int64_t n) {
            const f32x16 v = rounded(load(residual + i, n) + load(x + i, n), x);
            store(residual + i, v, n);
            squares.first += v * v;
        });
    return inverse_rms(squares.first + squares.second, eps, width);
}

// From x on, times the inverse of their root mean square and times their weights.
template <class T>
inline Pair normed(const T* x, float scale, const T* weight) {
    return rounded(load_pair(x) * scale, x) * load_pair(weight);
}

template <class T>
inline f32x16 normed(const T* x, float scale, const T* weight, int64_t n) {
    return rounded(load(x, n) * scale, x) * load(weight, n);
}

template <class T>
void norm(const NormArgs& g) {
#pragma omp parallel for if (g.rows * g.width >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < g.rows; r++) {
        const T* x = (const T*)g.x + r * g.x_stride;
        T* residual = g.residual ? (T*)g.residual + r * g.residual_stride : nullptr;
        const float scale = residual ? add_to(residual, x, g.eps, g.width) : inverse_rms(x, g.eps, g.width);
        if (residual) x = residual;
        const T* weight = (const T*)g.weight;
        T* out = (T*)g.out + r * g.width;
        for_pairs(
            g.width, [&](int64_t i) { store_pair(out + i, normed(x + i, scale, weight + i)); },
            [&](int64_t i, int64_t n) { store(out + i, normed(x + i, scale, weight + i, n), n); });
    }
}

// A head, normed where there are weights, whose two halves are the parts of dim / 2 complex numbers. turn: the half's
// cosines, then its sines, as `in_pair_order` puts them.
template <class T>
inline void rotate(const T* x, float scale, const T* weight, const float* turn, int64_t dim, T* out) {
    const int64_t half = dim / 2;
    for_pairs(
        half,
        [&](int64_t i) {
            const auto part = [&](int64_t from) {
                return weight ? rounded(normed(x + from, scale, weight + from), x) : load_pair(x + from);
            };
            const Pair a = part(i), b = part(half + i);
            const Pair c = load_pair(turn + i), s = load_pair(turn + half + i);
            store_pair(out + i, a * c - b * s);
            store_pair(out + half + i, b * c + a * s);
        },
        [&](int64_t i, int64_t n) {
            const auto part = [&](int64_t from) {
                return weight ? rounded(normed(x + from, scale, weight + from, n), x) : load(x + from, n);
            };
            const f32x16 a = part(i), b = part(half + i);
            const f32x16 c = load(turn + i, n), s = load(turn + half + i, n);
            store(out + i, a * c - b * s, n);
            store(out + half + i, b * c + a * s, n);
        });
}

template <class T>
void rope(const RopeArgs& g) {
    const int64_t all_heads = g.heads + 2 * g.kv_heads, half = g.dim / 2;
#pragma omp parallel for if (g.tokens * all_heads * g.dim >= PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < g.tokens; t++) {
        static thread_local Scratch<float> floats_of_thread;
        float* turn = floats_of_thread.reserve(g.dim + g.heads + g.kv_heads);
        float* scales = turn + g.dim;
        const T* x = (const T*)g.qkv + t * g.qkv_stride;
        for (int64_t part = 0; part < g.dim; part += half) {
            const float* from = g.cos_sin + g.positions[t] * g.dim + part;
            for_pairs(
                half, [&](int64_t i) { store_pair(turn + part + i, in_pair_order(from + i, x)); },
                [&](int64_t i, int64_t n) { store(turn + part + i, load(from + i, n), n); });
        }
        const int64_t slot = g.slots[t], kv_width = g.kv_heads * g.dim, row = slot * kv_width;
        const int64_t rotated = g.heads + (slot < 0 ? 0 : g.kv_heads);
        // What the next token reads and writes is fetched head by head: the slots are in any order.
        const int64_t after = std::min(t + 1, g.tokens - 1);
        const T* next = (const T*)g.qkv + after * g.qkv_stride;
        const int64_t next_row = std::max<int64_t>(g.slots[after], 0) * kv_width;
        // Of all heads first: each waits for its sum, its root and a division, which so overlap.
        for (int64_t h = 0; g.q_weight && h < rotated; h++) scales[h] = inverse_rms(x + h * g.dim, g.eps, g.dim);
        for (int64_t h = 0; h < rotated; h++) {
            const bool is_query = h < g.heads;
            const T* weight = (const T*)(is_query ? g.q_weight : g.k_weight);
            T* out = is_query ? (T*)g.q_out + (t * g.heads + h) * g.dim : (T*)g.k_cache + row + (h - g.heads) * g.dim;
            fetch(next + h * g.dim, g.dim);
            if (is_query) {
                fetch(out + g.heads * g.dim, g.dim);
            } else {
                const int64_t at = (h - g.heads) * g.dim;
                fetch(next + h * g.dim + kv_width, g.dim);
                fetch((const T*)g.k_cache + next_row + at, g.dim);
                fetch((const T*)g.v_cache + next_row + at, g.dim);
            }
            rotate(x + h * g.dim, scales[h], weight, turn, g.dim, out);
        }
        if (slot >= 0) memcpy((T*)g.v_cache + row, x + rotated * g.dim, kv_width * sizeof(T));
    }
}

template <class T>
void silu_and_mul(const SiluArgs& g) {
#pragma omp parallel for if (g.rows * g.width >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < g.rows; r++) {
        const T* gate = (const T*)g.gate_up + r * g.stride;
        const T* up = gate + g.width;
        T* out = (T*)g.out + r * g.width;
        for_pairs(
            g.width,
            [&](int64_t i) {
                fetch_pair(gate + i, SILU_FETCHED_BYTES), fetch_pair(up + i, SILU_FETCHED_BYTES);
                const Pair x = load_pair(gate + i);
                store_pair(out + i, rounded(Pair{silu(x.first, out), silu(x.second, out)}, out) * load_pair(up + i));
            },
            [&](int64_t i, int64_t n) {
                store(out + i, rounded(silu(load(gate + i, n), out), out) * load(up + i, n), n);
            });
    }
}

template <class T>
void combine(const CombineArgs& g) {
#pragma omp parallel for if (g.tokens * g.choices * g.width >= PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < g.tokens; t++) {
        const float* weights = g.weights + t * g.choices;
        for_vectors(g.width, [&](int64_t i, int64_t n) {
            f32x16 total = {};
            for (int64_t c = 0; c < g.choices; c++) {
                const int64_t pair = t * g.choices + c, row = g.places ? g.places[pair] : pair;
                total += load((const T*)g.values + row * g.stride + i, n) * weights[c];
            }
            store((T*)g.out + t * g.width + i, total, n);
        });
    }
}

// Softmax of one token's logits -> probabilities [experts]; false where a logit is NaN or the largest is infinite.
template <class T>
inline bool softmax(const T* logits, int64_t experts, float* probabilities) {
    float top = -std::numeric_limits<float>::infinity(), total = 0;
    bool is_finite = true;
    for_vectors(experts, [&](int64_t i, int64_t n) {
        const f32x16 x = load(logits + i, n);
        for (int64_t e = 0; e < n; e++) {
            probabilities[i + e] = x[e];
            is_finite = is_finite && x[e] == x[e];
            top = std::max(top, x[e]);
        }
    });
    if (!is_finite || std::isinf(top)) return false;
    for (int64_t e = 0; e < experts; e++) total += probabilities[e] = std::exp(probabilities[e] - top);
    for (int64_t e = 0; e < experts; e++) probabilities[e] /= total;
    return true;
}

// Counts each expert's pairs, then hands out places in the order of the tokens.
inline void sort_by_expert(const RouteArgs& g) {
    static thread_local Scratch<int64_t> next_of_thread;
    int64_t* next = next_of_thread.reserve(g.experts);
    std::fill_n(g.offsets, g.experts + 1, 0);
    for (int64_t pair = 0; pair < g.tokens * g.choices; pair++) g.offsets[g.ids[pair] + 1]++;
    for (int64_t e = 0; e < g.experts; e++) {
        next[e] = g.offsets[e];
        g.offsets[e + 1] += g.offsets[e];
    }
    for (int64_t pair = 0; pair < g.tokens * g.choices; pair++) {
        const int64_t place = next[g.ids[pair]]++;
        g.pairs[place] = pair;
        g.places[pair] = place;
    }
}

template <class T>
void route(const RouteArgs& g) {
#pragma omp parallel for if (g.tokens * g.experts >= PARALLEL_ELEMENTS / 16)
    for (int64_t t = 0; t < g.tokens; t++) {
        static thread_local Scratch<float> probabilities_of_thread;
        float* probabilities = probabilities_of_thread.reserve(g.experts);
        float* weights = g.weights + t * g.choices;
        int64_t* ids = g.ids + t * g.choices;
        const bool is_finite = softmax((const T*)g.logits + t * g.stride, g.experts, probabilities);
        float chosen = 0;
        for (int64_t c = 0; c < g.choices; c++) {
            int64_t best = 0;
            for (int64_t e = 1; e < g.experts; e++)
                if (probabilities[e] > probabilities[best]) best = e;  // ties to the lower id
            ids[c] = is_finite ? best : c;
            weights[c] = is_finite ? probabilities[best] : std::numeric_limits<float>::quiet_NaN();
            chosen += weights[c];
            probabilities[best] = -1;
        }
        if (g.renormalise)
            for (int64_t c = 0; c < g.choices; c++) weights[c] /= chosen;
    }
    if (g.offsets) sort_by_expert(g);  // of no pair there is no address
}

}  // namespace VARIANT
