// What the two kernels of attention share: the arguments, where a key lies, and how what a unit has summed is written.
#pragma once
#include "attention_plan.h"
#include "attention_vectors.h"

namespace VARIANT {

// What was summed for one query and head over some keys.
struct Sums {
    const float* values;  // [width]: sum of exp(score - largest) * value, as `pair_values` orders the dimensions
    float largest;        // score; -infinity where there is no key
    float total;          // sum of exp(score - largest)
};

// Sums of parts that wait for their merge; those of part p and head h at p * heads + h.
struct Parts {
    float* values = nullptr;  // [parts, heads, width]
    float* stats = nullptr;   // [parts, heads, 2]: largest, total
};

template <class T>
struct Attention {
    const AttentionArgs& args;
    const Plan& plan;
    const Parts parts;

    const int64_t group = args.heads / args.kv_heads;          // query heads of a KV head
    const int64_t vectors = vectors_of<T>(args.dim);           // of a head of keys, values or queries
    const int64_t tail_words = args.dim % STEP<T> / PACK<T>;   // of the last vector; 0: it is whole
    const int64_t width = vectors * STEP<T>;                   // float32 sums of a head

    // Vector v of a head: short if it is the last.
    u32x16 read_vector(const T* head, int64_t v) const {
        const T* from = head + v * STEP<T>;
        return tail_words && v + 1 == vectors ? read_words(from, tail_words) : read<u32x16>(from);
    }

    const T* query(int64_t query, int64_t head) const {
        return static_cast<const T*>(args.q) + query * args.q_stride + head * args.dim;
    }

    void write(const Unit& unit, int64_t query, int64_t head, const Sums& sums) const {
        if (unit.part < 0) return write_output(query, head, sums);
        const int64_t to = (plan.first_part[query] + unit.part) * args.heads + head;
        memcpy(parts.values + to * width, sums.values, width * sizeof(float));
        parts.stats[2 * to] = sums.largest;
        parts.stats[2 * to + 1] = sums.total;
    }

    // Adds up the parts of a query and head, in their order whatever thread computed which. values: scratch, [width].
    void merge(int64_t query, int64_t head, float* values) const {
        const int64_t first = plan.first_part[query] * args.heads + head;
        const int64_t end = plan.first_part[query + 1] * args.heads + head;
        float top = -INFINITY, total = 0;
        for (int64_t p = first; p < end; p += args.heads) top = std::max(top, parts.stats[2 * p]);
        memset(values, 0, width * sizeof(float));
        for (int64_t p = first; p < end; p += args.heads) {
            // A part without keys has no largest score: minus infinity less itself would be NaN.
            const float share = parts.stats[2 * p + 1] == 0 ? 0 : std::exp(parts.stats[2 * p] - top);
            total += share * parts.stats[2 * p + 1];
            const float* from = parts.values + p * width;
            for (int64_t d = 0; d < width; d += LANES) store(values + d, load(values + d) + load(from + d) * share);
        }
        write_output(query, head, {values, top, total});
    }

  private:
    void write_output(int64_t query, int64_t head, const Sums& sums) const {
        T* out = static_cast<T*>(args.out) + (query * args.heads + head) * args.dim;
        // Here, where all parts of a query have met, so that its sink counts once.
        const float sink = args.sinks ? std::exp(args.sinks[head] - sums.largest) : 0;
        const float share = sums.total == 0 ? 0 : 1 / (sums.total + sink);
        for (int64_t d = 0; d < args.dim; d += STEP<T>) {
            f32x16 first = load(sums.values + d);
            if constexpr (PACK<T> == 2) {
                f32x16 second = load(sums.values + d + LANES);
                in_order(first, second);
                if (args.dim > d + LANES) store(out + d + LANES, second * share, args.dim - d - LANES);
            }
            store(out + d, first * share, args.dim - d);
        }
    }
};

}  // namespace VARIANT
