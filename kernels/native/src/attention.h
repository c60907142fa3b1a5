// Attention over the paged cache, keys and values read where they lie: decode, chunks of prompts, and prefixes that
// rows share, in one call. `Plan` cuts it, `Stream` and `TileAttention` compute the pieces.
#pragma once
#include <omp.h>

#include <atomic>

#include "attention_stream.h"
#include "attention_tiles.h"
#include "scratch.h"

namespace VARIANT {

template <class T>
void attention(const AttentionArgs& args) {
    const Plan plan(args, omp_get_max_threads());
    const bool has_cuts = plan.has_cuts();
    const int64_t num_sums = plan.num_parts() * args.heads, width = vectors_of<T>(args.dim) * STEP<T>;
    static thread_local Scratch<float> parts_memory;
    Parts parts;
    if (has_cuts) {
        parts.values = parts_memory.reserve(num_sums * (width + 2));
        parts.stats = parts.values + num_sums * width;
    }
    const Attention<T> attention{args, plan, parts};
    const int64_t num_outputs = args.starts[args.rows] * args.heads;
    std::atomic<size_t> next{0};
#pragma omp parallel
    {
        [[maybe_unused]] Tiles tiles;
        static thread_local Scratch<float> memory;
        const int64_t streamed = Stream<T>::num_floats(attention), tiled = TileAttention<T>::num_floats(attention);
        float* own = memory.reserve(std::max(streamed, tiled));
        Stream<T> stream(attention, own);
        TileAttention<T> tile_attention(attention, own);
        for (size_t i; (i = next++) < plan.units.size();) {
            const Unit& unit = plan.units[i];
            unit.is_streamed ? stream.run(unit) : tile_attention.run(unit);
        }
        if (has_cuts) {
#pragma omp barrier
#pragma omp for
            for (int64_t i = 0; i < num_outputs; i++) {
                if (plan.is_cut(i / args.heads)) attention.merge(i / args.heads, i % args.heads, own);
            }
        }
    }
}

}  // namespace VARIANT
