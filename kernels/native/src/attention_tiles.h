// Attention of many queries that read the same keys, by products of tiles: chunks of prompts, prefixes that rows share,
// and more query heads a KV head than `Stream` takes. A lane is a query and one of its heads.
//
// Scores are keys times queries, so that each of 16 lanes has its maximum and its sum in its own element of a vector.
// Keys and values are copied into tiles, a round of keys at a time: tiles of any block size and head_dim, in the first
// two caches, with zeros where nothing is. For 64 lanes that is a few percent of the products.
#pragma once
#include "attention_state.h"

namespace VARIANT {

constexpr int64_t ROUND_KEYS = 256;
constexpr int64_t TILE_WORDS = LANES * LANES;

#ifdef USE_AMX
template <class T>
constexpr bool HAS_TILE_UNITS = sizeof(T) == 2;
#else
template <class T>
constexpr bool HAS_TILE_UNITS = false;
#endif

// Left tiles in words, all steps of 16 rows one behind the other: row r's word i at r * ROW + i * WORD of its tile.
template <int64_t ROW, int64_t WORD>
struct LeftTiles {
    const uint32_t* first;
    int64_t next;  // words from one 16 rows to the next
};

// Right tiles, all steps of 16 columns one behind the other: word i of the columns at i * 16.
struct RightTiles {
    const uint32_t* first;
    int64_t next;  // words from one 16 columns to the next
};

// c [ROWS, 16 COLUMNS] = a b or c += a b, in registers. The distances of a's words are known to the compiler.
template <class T, int ROWS, int COLUMNS, int64_t ROW, int64_t WORD>
inline void multiply_block(const uint32_t* a, RightTiles b, int64_t steps, float* c, int64_t ldc, bool add) {
    f32x16 sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) sums[r][j] = add ? load(c + r * ldc + j * LANES) : f32x16{};
    }
    for (int64_t s = 0; s < steps; s++, a += TILE_WORDS, b.first += TILE_WORDS) {
        for (int64_t i = 0; i < LANES; i++) {
            const uint32_t* right = b.first + i * LANES;
            const u32x16 words[2] = {read<u32x16>(right), COLUMNS > 1 ? read<u32x16>(right + b.next) : u32x16{}};
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
                for (int j = 0; j < COLUMNS; j++) sums[r][j] = dot<T>(sums[r][j], a[r * ROW + i * WORD], words[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) store(c + r * ldc + j * LANES, sums[r][j]);
    }
}

// c [16 rows, 16 columns] = a b or c += a b, one or two tiles of rows and of columns; rows of c are ldc apart.
template <class T, int64_t ROW, int64_t WORD>
inline void multiply(LeftTiles<ROW, WORD> a, int64_t rows, RightTiles b, int64_t columns, int64_t steps, float* c,
                     int64_t ldc, bool add) {
    if constexpr (HAS_TILE_UNITS<T>) {
        static_assert(ROW == LANES && WORD == 1, "a unit loads rows");
        const T* left = reinterpret_cast<const T*>(a.first);
        const T* right = reinterpret_cast<const T*>(b.first);
        const Left<T> sides{left, rows > 1 ? left + a.next * PACK<T> : nullptr};
        product<T>(sides, {right, columns > 1 ? right + b.next * PACK<T> : nullptr}, steps, c, ldc, add);
    } else {
        for (int64_t r = 0; r < rows * LANES; r += BLOCK_ROWS) {
            const uint32_t* from = a.first + r / LANES * a.next + r % LANES * ROW;
            float* to = c + r * ldc;
            for (int64_t j = 0; j < columns; j += BLOCK_COLUMNS) {
                const RightTiles right{b.first + j * b.next, b.next};
                float* out = to + j * LANES;
                if (columns - j >= BLOCK_COLUMNS) {
                    multiply_block<T, BLOCK_ROWS, BLOCK_COLUMNS, ROW, WORD>(from, right, steps, out, ldc, add);
                } else {
                    multiply_block<T, BLOCK_ROWS, 1, ROW, WORD>(from, right, steps, out, ldc, add);
                }
            }
        }
    }
}

template <class T>
class TileAttention {
  public:
    // memory: `num_floats` of them, for as long as units are run
    TileAttention(const Attention<T>& attention, float* memory)
        : attention_(attention), args_(attention.args), width_(attention.width) {
        sums_ = memory;
        scores_ = sums_ + MAX_UNIT_LANES * width_;
        queries_ = reinterpret_cast<uint32_t*>(scores_ + ROUND_KEYS * MAX_UNIT_LANES);
        keys_ = queries_ + MAX_TILES * attention_.vectors * TILE_WORDS;
        values_ = keys_ + ROUND_KEYS / LANES * attention_.vectors * TILE_WORDS;
        weights_ = values_ + width_ / LANES * ROUND_STEPS * TILE_WORDS;
    }

    static int64_t num_floats(const Attention<T>& attention) {
        const int64_t width = attention.width, key_tiles = ROUND_KEYS / LANES * attention.vectors;
        const int64_t tiles = MAX_TILES * (attention.vectors + ROUND_STEPS) + key_tiles + width / LANES * ROUND_STEPS;
        return MAX_UNIT_LANES * (width + ROUND_KEYS) + tiles * TILE_WORDS;
    }

    void run(const Unit& unit) {
        unit_ = &unit;
        lanes_ = unit.num_queries * unit.num_heads;
        tiles_ = (lanes_ + LANES - 1) / LANES;
        begin();
        for (int64_t from = unit.begin; from < unit.end; from += ROUND_KEYS) {
            add(from, std::min(ROUND_KEYS, unit.end - from));
        }
        for (int64_t lane = 0; lane < lanes_; lane++) {
            const int64_t tile = lane / LANES, place = lane % LANES;
            const Sums sums{sums_ + lane * width_, largest_[tile][place], totals_[tile][place]};
            attention_.write(unit, query_of(lane), head_of(lane), sums);
        }
    }

  private:
    static constexpr int64_t MAX_TILES = MAX_UNIT_LANES / LANES;
    static constexpr int64_t ROUND_STEPS = ROUND_KEYS / STEP<T>;
    static constexpr int64_t FETCHED_KEYS = 8;  // between the key that is copied and the one that is fetched
    static constexpr int64_t LANE_TILES = ROUND_STEPS * TILE_WORDS;  // words of the weights of 16 lanes

    const Attention<T>& attention_;
    const AttentionArgs& args_;
    const int64_t width_;
    const Unit* unit_ = nullptr;
    int64_t lanes_ = 0, tiles_ = 0;
    float* sums_;                     // [lanes, width]
    float* scores_;                   // [ROUND_KEYS, tiles * 16]
    uint32_t* queries_;               // right tiles [tiles][vectors]
    uint32_t* keys_;                  // left tiles [ROUND_KEYS / 16][vectors]
    uint32_t* values_;                // right tiles [width / 16][ROUND_STEPS]
    uint32_t* weights_;               // left tiles [tiles][ROUND_STEPS]; without units for tiles each is transposed
    i32x16 limits_[MAX_TILES];        // the last key that each lane sees
    f32x16 largest_[MAX_TILES];       // score of each lane so far
    f32x16 totals_[MAX_TILES];        // sum of its weights

    int64_t query_of(int64_t lane) const { return unit_->query + lane / unit_->num_heads; }
    int64_t head_of(int64_t lane) const {
        return unit_->kv_head * attention_.group + unit_->first_head + lane % unit_->num_heads;
    }

    // Lanes behind the last repeat it; nothing of them is written.
    void begin() {
        for (int64_t tile = 0; tile < tiles_; tile++) {
            largest_[tile] = splat(-INFINITY);
            totals_[tile] = f32x16{};
            int64_t lanes[LANES];
            for (int64_t r = 0; r < LANES; r++) {
                lanes[r] = std::min(tile * LANES + r, lanes_ - 1);
                const int64_t last_key = unit_->last_key + lanes[r] / unit_->num_heads;
                limits_[tile][r] = static_cast<int32_t>(std::min(last_key, unit_->end - 1));
            }
            for (int64_t v = 0; v < attention_.vectors; v++) {
                u32x16 words[LANES];
                for (int64_t r = 0; r < LANES; r++) {
                    words[r] = attention_.read_vector(attention_.query(query_of(lanes[r]), head_of(lanes[r])), v);
                }
                transpose(words);
                memcpy(queries_ + (tile * attention_.vectors + v) * TILE_WORDS, words, sizeof words);
            }
        }
        memset(sums_, 0, tiles_ * LANES * width_ * sizeof(float));
    }

    // Keys from .. from + count - 1.
    void add(int64_t from, int64_t count) {
        copy_keys(from, count);
        copy_values(from, count);
        const int64_t ldc = tiles_ * LANES, vectors = attention_.vectors, head_tiles = vectors * TILE_WORDS;
        for (int64_t tile = 0; tile < tiles_; tile += 2) {
            const int64_t two = std::min<int64_t>(tiles_ - tile, 2);
            const int64_t seen = std::clamp<int64_t>(limits_[tile + two - 1][LANES - 1] + 1 - from, 0, count);
            if (seen == 0) continue;
            const RightTiles queries{queries_ + tile * head_tiles, head_tiles};
            for (int64_t k = 0; k < seen; k += 2 * LANES) {
                const LeftTiles<LANES, 1> keys{keys_ + k / LANES * head_tiles, head_tiles};
                const int64_t rows = k + LANES < seen ? 2 : 1;
                multiply<T>(keys, rows, queries, two, vectors, scores_ + k * ldc + tile * LANES, ldc, false);
            }
            const int64_t steps = (seen + STEP<T> - 1) / STEP<T>;
            for (int64_t t = tile; t < tile + two; t++) weigh(t, from, seen, steps);
            constexpr int64_t ROW = HAS_TILE_UNITS<T> ? LANES : 1, WORD = HAS_TILE_UNITS<T> ? 1 : LANES;
            const LeftTiles<ROW, WORD> weights{weights_ + tile * LANE_TILES, LANE_TILES};
            for (int64_t d = 0; d < width_; d += 2 * LANES) {
                const RightTiles values{values_ + d / LANES * LANE_TILES, LANE_TILES};
                const int64_t columns = d + LANES < width_ ? 2 : 1;
                multiply<T>(weights, two, values, columns, steps, sums_ + tile * LANES * width_ + d, width_, true);
            }
        }
    }

    // Of the unit's KV head; past the last of `count` keys the last one again.
    const T* cached(const void* cache, int64_t from, int64_t k, int64_t count) const {
        const int64_t offset = attention_.offset(unit_->row, from + std::min(k, count - 1));
        return static_cast<const T*>(cache) + offset + unit_->kv_head * args_.head_stride;
    }

    // One head's keys lie a token apart, too far for the CPU to guess the next.
    void fetch(const T* head) const {
        for (int64_t d = 0; d < args_.dim; d += 64 / sizeof(T)) __builtin_prefetch(head + d);
    }

    void copy_keys(int64_t from, int64_t count) {
        for (int64_t k = 0; k < (count + LANES - 1) / LANES * LANES; k++) {
            const T* key = cached(args_.k, from, k, count);
            fetch(cached(args_.k, from, k + FETCHED_KEYS, count));
            uint32_t* to = keys_ + k / LANES * attention_.vectors * TILE_WORDS + k % LANES * LANES;
            for (int64_t v = 0; v < attention_.vectors; v++) write(to + v * TILE_WORDS, attention_.read_vector(key, v));
        }
    }

    // The weights of what lies past the last key are 0; so are its values, since 0 times NaN is NaN.
    void copy_values(int64_t from, int64_t count) {
        constexpr int64_t KEYS = PACK<T>;  // of a word
        for (int64_t k = 0; k < (count + STEP<T> - 1) / STEP<T> * STEP<T>; k += KEYS) {
            const T* a = cached(args_.v, from, k, count);
            for (int64_t e = 0; e < KEYS; e++) fetch(cached(args_.v, from, k + e + FETCHED_KEYS, count));
            const T* b = cached(args_.v, from, k + KEYS - 1, count);
            uint32_t* to = values_ + k / STEP<T> * TILE_WORDS + k % STEP<T> / KEYS * LANES;
            for (int64_t v = 0; v < attention_.vectors; v++, to += KEYS * LANE_TILES) {
                const u32x16 first = k < count ? attention_.read_vector(a, v) : u32x16{};
                if constexpr (KEYS == 1) {
                    write(to, first);
                } else {
                    const u32x16 second = k + 1 < count ? attention_.read_vector(b, v) : u32x16{};
                    const ValuePairs pairs = pair_values(first, second);
                    write(to, pairs.first);
                    write(to + LANE_TILES, pairs.second);
                }
            }
        }
    }

    // Turns the scores of 16 lanes and the round's first `seen` keys into weights, exp(score - largest), in left tiles
    // of `steps` steps. What was summed before shrinks to the new largest scores.
    void weigh(int64_t tile, int64_t from, int64_t seen, int64_t steps) {
        const int64_t ldc = tiles_ * LANES;
        float* scores = scores_ + tile * LANES;
        const i32x16 limit = limits_[tile] - static_cast<int32_t>(from);  // counted from the round's first key
        const int64_t seen_by_all = std::clamp<int64_t>(limit[0] + 1, 0, seen);
        // The keys before this one, of which there are some with a window alone, are not seen by all either.
        const i32x16 first = limit - static_cast<int32_t>(args_.window - 1);
        const int64_t first_of_all = args_.window ? first[LANES - 1] : 0;
        f32x16 top = largest_[tile];
        for (int64_t k = 0; k < seen; k++) {
            f32x16 score = load(scores + k * ldc) * args_.scale;
            if (args_.soft_cap > 0) score = capped(score, args_.soft_cap);
            const i32x16 key = static_cast<int32_t>(k) + i32x16{};
            if (k >= seen_by_all) score = key <= limit ? score : splat(-INFINITY);
            if (k < first_of_all) score = key >= first ? score : splat(-INFINITY);
            store(scores + k * ldc, score);
            top = max(top, score);
        }
        // A lane that has seen no key has no largest score: minus infinity less itself would be NaN.
        const f32x16 base = top == -INFINITY ? f32x16{} : top;
        const f32x16 shrink = weight_of(largest_[tile] - base);
        f32x16 total = totals_[tile] * shrink;
        uint32_t* out = weights_ + tile * LANE_TILES;
        for (int64_t step = 0; step < steps; step++, out += TILE_WORDS) {
            u32x16 words[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                f32x16 w[PACK<T>];
                for (int64_t e = 0; e < PACK<T>; e++) {
                    const int64_t k = step * STEP<T> + i * PACK<T> + e;
                    w[e] = k < seen ? weight_of(load(scores + k * ldc) - base) : f32x16{};
                    total += w[e];
                }
                words[i] = as_words(w, static_cast<const T*>(nullptr));
            }
            if constexpr (HAS_TILE_UNITS<T>) transpose(words);
            memcpy(out, words, sizeof words);
        }
        for (int64_t r = 0; r < LANES; r++) {
            if (shrink[r] == 1.f) continue;
            float* sums = sums_ + (tile * LANES + r) * width_;
            for (int64_t d = 0; d < width_; d += LANES) store(sums + d, load(sums + d) * shrink[r]);
        }
        largest_[tile] = top;
        totals_[tile] = total;
    }

    static u32x16 as_words(const f32x16* w, const float*) { return (u32x16)w[0]; }
    static u32x16 as_words(const f32x16* w, const bf16*) { return wide(narrow(w[0])) | wide(narrow(w[1])) << 16; }
};

}  // namespace VARIANT
