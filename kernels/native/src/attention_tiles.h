// Attention of many queries that read the same keys, by products of tiles: chunks of prompts, prefixes that rows share,
// and more query heads a KV head than `Stream` takes. A lane is a query and one of its heads.
//
// Scores are keys times queries, so that each of 16 lanes has its maximum and its sum in its own element of a vector.
// A round of keys at a time: its scores, of keys read where they lie; its values copied into tiles, of any block size and
// head_dim, with zeros where nothing is. Units for tiles need tiles of keys, too. Beside products by vectors the thread
// fetches what comes next, down to the queries of its next unit.
#pragma once
#include <omp.h>

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

// Right tiles, all words of 16 columns one behind the other: word i of the columns at i * 16.
struct RightTiles {
    const uint32_t* first;
    int64_t next;  // words from one 16 columns to the next
};

// c [ROWS, 16 COLUMNS] = a b or c += a b over so many words, in registers. left(r, i): word i of a's row r.
template <class T, int ROWS, int COLUMNS, class Left>
inline void multiply_block(const Left& left, RightTiles b, int64_t words, float* c, int64_t ldc, bool add) {
    f32x16 sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) sums[r][j] = add ? load(c + r * ldc + j * LANES) : f32x16{};
    }
    for (int64_t i = 0; i < words; i++, b.first += LANES) {
        const u32x16 right[2] = {read<u32x16>(b.first), COLUMNS > 1 ? read<u32x16>(b.first + b.next) : u32x16{}};
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const uint32_t word = left(r, i);
#pragma GCC unroll 2
            for (int j = 0; j < COLUMNS; j++) sums[r][j] = dot<T>(sums[r][j], word, right[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j++) store(c + r * ldc + j * LANES, sums[r][j]);
    }
}

// The same for one or two tiles of columns.
template <class T, class Left>
inline void multiply_rows(const Left& left, RightTiles b, int64_t columns, int64_t words, float* c, int64_t ldc, bool add) {
    if (columns > 1 && BLOCK_COLUMNS > 1) {
        return multiply_block<T, BLOCK_ROWS, BLOCK_COLUMNS>(left, b, words, c, ldc, add);
    }
    for (int64_t j = 0; j < columns; j++) {
        const RightTiles one{b.first + j * b.next, 0};
        multiply_block<T, BLOCK_ROWS, 1>(left, one, words, c + j * LANES, ldc, add);
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
        queries_ = reinterpret_cast<uint32_t*>(scores_ + ROUND_KEYS * PAIR_LANES);
        values_ = queries_ + MAX_TILES * attention_.vectors * TILE_WORDS;
        weights_ = values_ + width_ / LANES * VALUE_TILES;
        keys_ = weights_ + PAIR * LANE_TILES;
    }

    static int64_t num_floats(const Attention<T>& attention) {
        const int64_t width = attention.width, head_tiles = attention.vectors * TILE_WORDS;
        const int64_t tiles = MAX_TILES * head_tiles + width / LANES * VALUE_TILES + PAIR * LANE_TILES;
        const int64_t keys = HAS_TILE_UNITS<T> ? ROUND_KEYS / LANES * head_tiles : 0;
        return MAX_UNIT_LANES * width + ROUND_KEYS * PAIR_LANES + tiles + keys;
    }

    void run(const Unit& unit) {
        unit_ = &unit;
        lanes_ = unit.num_queries * unit.num_heads;
        tiles_ = (lanes_ + LANES - 1) / LANES;
        begin();
        if constexpr (!HAS_TILE_UNITS<T>) look_ahead();
        for (int64_t from = unit.begin; from < unit.end; from += ROUND_KEYS) {
            add(from, std::min(ROUND_KEYS, unit.end - from));
        }
        for (int64_t tile = 0; tile < tiles_; tile += PAIR) {
            if (!has_sums_[tile / PAIR]) memset(sums_of(tile), 0, PAIR_LANES * width_ * sizeof(float));
        }
        for (int64_t lane = 0; lane < lanes_; lane++) {
            const int64_t tile = lane / LANES, place = lane % LANES;
            const Sums sums{sums_ + lane * width_, largest_[tile][place], totals_[tile][place]};
            attention_.write(unit, places_[lane].query, places_[lane].head, sums);
        }
    }

  private:
    static constexpr int64_t MAX_TILES = MAX_UNIT_LANES / LANES;
    static constexpr int64_t PAIR = 2, PAIR_LANES = PAIR * LANES;  // tiles of lanes that are multiplied together
    static constexpr int64_t KEY_STEP = HAS_TILE_UNITS<T> ? STEP<T> : PACK<T>;     // keys that are weighted together
    static constexpr int64_t SCORE_STEP = KEY_STEP > 4 ? KEY_STEP : 4;             // whose scores are looked at together
    // Between the key that is multiplied, or for units copied, and the one that is fetched.
    static constexpr int64_t FETCHED_KEYS = HAS_TILE_UNITS<T> ? 8 : 32;
    static constexpr int64_t AHEAD_KEYS = 512;   // fetched of the next unit at most: a part of the second cache
    static constexpr int64_t AHEAD_STEP = 8;     // heads of it that are fetched with each block of scores or sums
    static constexpr int64_t LANE_TILES = ROUND_KEYS / PACK<T> * LANES;  // words of the weights of 16 lanes
    // Words of 16 dimensions of the values, and a line: all that is copied of a key would fall into one set of the cache.
    static constexpr int64_t VALUE_TILES = LANE_TILES + LANES;

    const Attention<T>& attention_;
    const AttentionArgs& args_;
    const int64_t width_;
    const Unit* unit_ = nullptr;
    int64_t lanes_ = 0, tiles_ = 0;
    float* sums_;                     // [lanes, width]
    float* scores_;                   // [ROUND_KEYS, PAIR_LANES]
    uint32_t* queries_;               // right tiles [tiles][vectors]
    uint32_t* values_;                // right tiles [width / 16][ROUND_KEYS / PACK]
    uint32_t* weights_;               // [PAIR][ROUND_KEYS / PACK][16 lanes]; for units left tiles: each is transposed
    uint32_t* keys_;                  // for units alone: left tiles [ROUND_KEYS / 16][vectors]
    int64_t offsets_[ROUND_KEYS + FETCHED_KEYS];  // of the round's keys and the next ones in a cache
    bool has_sums_[MAX_TILES / PAIR];  // of these tiles; until then `sums_` holds nothing
    i32x16 limits_[MAX_TILES];        // the last key that each lane sees
    f32x16 largest_[MAX_TILES];       // score of each lane so far
    f32x16 totals_[MAX_TILES];        // sum of its weights

    struct Place {
        int64_t query, head;
    };
    Place places_[MAX_UNIT_LANES];  // of each lane; behind the last it is repeated, and nothing of them is written
    const T* ahead_[MAX_UNIT_LANES + 2 * AHEAD_KEYS];  // heads that the thread probably reads next
    int64_t num_ahead_ = 0, next_ahead_ = 0;

    float* sums_of(int64_t tile) const { return sums_ + tile * LANES * width_; }

    void begin() {
        Place place{unit_->query, unit_->kv_head * attention_.group + unit_->first_head};
        const int64_t first_head = place.head;
        for (int64_t lane = 0; lane < tiles_ * LANES; lane++) {
            places_[lane] = place;
            const int64_t last_key = unit_->last_key + place.query - unit_->query;
            limits_[lane / LANES][lane % LANES] = static_cast<int32_t>(std::min(last_key, unit_->end - 1));
            if (lane + 1 >= lanes_) continue;
            if (++place.head == first_head + unit_->num_heads) place = {place.query + 1, first_head};
        }
        for (int64_t tile = 0; tile < tiles_; tile++) {
            largest_[tile] = splat(-INFINITY);
            totals_[tile] = f32x16{};
            for (int64_t v = 0; v < attention_.vectors; v++) {
                u32x16 words[LANES];
                for (int64_t r = 0; r < LANES; r++) {
                    const Place& lane = places_[tile * LANES + r];
                    words[r] = attention_.read_vector(attention_.query(lane.query, lane.head), v);
                }
                transpose(words);
                memcpy(queries_ + (tile * attention_.vectors + v) * TILE_WORDS, words, sizeof words);
            }
        }
        std::fill_n(has_sums_, MAX_TILES / PAIR, false);
    }

    // Lists the queries, and keys and values of other heads or rows, of the unit that this thread probably runs next: of
    // the keys of a head 256 bytes lie together, and the CPU by itself fetches none of the others.
    void look_ahead() {
        num_ahead_ = next_ahead_ = 0;
        const std::vector<Unit>& units = attention_.plan.units;
        const size_t index = unit_ - units.data() + omp_get_num_threads();
        if (index >= units.size() || units[index].is_streamed) return;
        const Unit* next = &units[index];
        const int64_t head = next->kv_head * attention_.group + next->first_head;
        for (int64_t i = 0; i < next->num_queries * next->num_heads; i++) {
            ahead_[num_ahead_++] = attention_.query(next->query + i / next->num_heads, head + i % next->num_heads);
        }
        if (next->row == unit_->row && next->kv_head == unit_->kv_head && next->begin < unit_->end) return;
        int64_t offsets[AHEAD_KEYS];
        const int64_t count = std::min(next->end - next->begin, AHEAD_KEYS);
        locate(*next, next->begin, count, offsets);
        for (const void* cache : {args_.k, args_.v}) {
            for (int64_t k = 0; k < count; k++) ahead_[num_ahead_++] = static_cast<const T*>(cache) + offsets[k];
        }
    }

    void fetch_ahead() {
        const int64_t end = std::min(next_ahead_ + AHEAD_STEP, num_ahead_);
        for (; next_ahead_ < end; next_ahead_++) fetch(ahead_[next_ahead_]);
    }

    // Keys from .. from + count - 1. The last lanes, which see the most of them, come first: with them the keys and the
    // values come into the caches.
    void add(int64_t from, int64_t count) {
        const int64_t known = std::min(unit_->end - from, ROUND_KEYS + FETCHED_KEYS);
        locate(*unit_, from, known, offsets_);
        // Past the unit's last key that one again.
        std::fill(offsets_ + known, offsets_ + ROUND_KEYS + FETCHED_KEYS, offsets_[known - 1]);
        if constexpr (HAS_TILE_UNITS<T>) copy_keys(count);
        const int64_t last = (tiles_ - 1) / PAIR * PAIR;
        for (int64_t tile = last; tile >= 0; tile -= PAIR) {
            const int64_t two = std::min(tiles_ - tile, PAIR);
            const int64_t seen = std::clamp<int64_t>(limits_[tile + two - 1][LANES - 1] + 1 - from, 0, count);
            if (seen > 0) score(tile, two, seen, tile == last);
            if (tile == last) copy_values(count);
            if (seen == 0) continue;
            for (int64_t t = tile; t < tile + two; t++) weigh(t, from, seen);
            sum_values(tile, two, seen, unit_->part < 0 && from + count == unit_->end);
            has_sums_[tile / PAIR] = true;
        }
    }

    // Where `count` keys of the unit's row and KV head lie.
    void locate(const Unit& unit, int64_t from, int64_t count, int64_t* offsets) const {
        const int64_t size = args_.block_size, stride = args_.token_stride;
        const int32_t* blocks = args_.tables + unit.row * args_.table_width + from / size;
        for (int64_t k = 0, place = from % size; k < count; place = 0, blocks++) {
            int64_t offset = *blocks * args_.block_stride + place * stride + unit.kv_head * args_.head_stride;
            for (const int64_t end = std::min(k + size - place, count); k < end; k++, offset += stride) offsets[k] = offset;
        }
    }

    const T* key(int64_t k) const { return static_cast<const T*>(args_.k) + offsets_[k]; }
    const T* value(int64_t k) const { return static_cast<const T*>(args_.v) + offsets_[k]; }

    // One head's keys lie a token apart, too far for the CPU to guess the next.
    void fetch(const T* head) const {
        for (int64_t d = 0; d < args_.dim; d += 64 / sizeof(T)) __builtin_prefetch(head + d);
    }

    // Scores of one or two tiles of lanes and the round's first `seen` keys, which are read where they lie.
    void score(int64_t tile, int64_t two, int64_t seen, bool is_first) {
        const int64_t head_tiles = attention_.vectors * TILE_WORDS;
        const RightTiles queries{queries_ + tile * head_tiles, head_tiles};
        if constexpr (HAS_TILE_UNITS<T>) {
            for (int64_t k = 0; k < seen; k += 2 * LANES) {
                const T* keys = reinterpret_cast<const T*>(keys_ + k / LANES * head_tiles);
                const Left<T> left{keys, k + LANES < seen ? keys + head_tiles * PACK<T> : nullptr};
                product<T>(left, as_right(queries, two), attention_.vectors, scores_ + k * PAIR_LANES, PAIR_LANES, false);
            }
        } else {
            for (int64_t k = 0; k < seen; k += BLOCK_ROWS) {
                const T* keys[BLOCK_ROWS];
                for (int64_t r = 0; r < BLOCK_ROWS; r++) keys[r] = key(k + r);
                if (is_first) {
                    for (int64_t r = 0; r < BLOCK_ROWS; r++) fetch(key(k + r + FETCHED_KEYS)), fetch(value(k + r));
                }
                fetch_ahead();
                const auto word = [&keys](int r, int64_t i) { return read<uint32_t>(keys[r] + i * PACK<T>); };
                multiply_rows<T>(word, queries, two, args_.dim / PACK<T>, scores_ + k * PAIR_LANES, PAIR_LANES, false);
            }
        }
    }

    static Right<T> as_right(RightTiles tiles, int64_t columns) {
        const T* first = reinterpret_cast<const T*>(tiles.first);
        return {first, columns > 1 ? first + tiles.next * PACK<T> : nullptr};
    }

    // Adds the round's first `seen` values, weighted, to the sums of one or two tiles of lanes.
    void sum_values(int64_t tile, int64_t two, int64_t seen, bool is_last) {
        const bool add = has_sums_[tile / PAIR];
        for (int64_t d = 0; d < width_; d += 2 * LANES) {
            const RightTiles values{values_ + d / LANES * VALUE_TILES, VALUE_TILES};
            const int64_t columns = d + LANES < width_ ? 2 : 1;
            float* sums = sums_of(tile) + d;
            if constexpr (HAS_TILE_UNITS<T>) {
                const T* weights = reinterpret_cast<const T*>(weights_);
                const Left<T> left{weights, two > 1 ? weights + LANE_TILES * PACK<T> : nullptr};
                product<T>(left, as_right(values, columns), (seen + STEP<T> - 1) / STEP<T>, sums, width_, add);
            } else {
                for (int64_t r = 0; r < two * LANES; r += BLOCK_ROWS) {
                    fetch_ahead();
                    if (is_last) fetch_outputs(tile * LANES + r, d);
                    const uint32_t* weights = weights_ + r / LANES * LANE_TILES + r % LANES;
                    const auto word = [weights](int row, int64_t i) { return weights[i * LANES + row]; };
                    multiply_rows<T>(word, values, columns, (seen + PACK<T> - 1) / PACK<T>, sums + r * width_, width_, add);
                }
            }
        }
    }

    // Where some lanes' results will lie, from dimension d on.
    void fetch_outputs(int64_t lane, int64_t d) const {
        for (int64_t r = lane; r < lane + BLOCK_ROWS; r++) {
            const T* out = static_cast<const T*>(args_.out) + (places_[r].query * args_.heads + places_[r].head) * args_.dim;
            for (int64_t line = d; line < d + 2 * LANES; line += LINE<T>) __builtin_prefetch(out + line, 1);
        }
    }

    void copy_keys(int64_t count) {
        for (int64_t k = 0; k < (count + LANES - 1) / LANES * LANES; k++) {
            fetch(key(k + FETCHED_KEYS));
            uint32_t* to = keys_ + k / LANES * attention_.vectors * TILE_WORDS + k % LANES * LANES;
            for (int64_t v = 0; v < attention_.vectors; v++) write(to + v * TILE_WORDS, attention_.read_vector(key(k), v));
        }
    }

    // The weights of what lies past the last key are 0; so are its values, since 0 times NaN is NaN.
    void copy_values(int64_t count) {
        for (int64_t k = 0; k < (count + KEY_STEP - 1) / KEY_STEP * KEY_STEP; k += PACK<T>) {
            const T *a = value(k), *b = value(k + PACK<T> - 1);
            if constexpr (HAS_TILE_UNITS<T>) fetch(value(k + FETCHED_KEYS)), fetch(value(k + 1 + FETCHED_KEYS));
            uint32_t* to = values_ + k / PACK<T> * LANES;
            for (int64_t v = 0; v < attention_.vectors; v++, to += PACK<T> * VALUE_TILES) {
                const u32x16 first = k < count ? attention_.read_vector(a, v) : u32x16{};
                if constexpr (PACK<T> == 1) {
                    write(to, first);
                } else {
                    const u32x16 second = k + 1 < count ? attention_.read_vector(b, v) : u32x16{};
                    const ValuePairs pairs = pair_values(first, second);
                    write(to, pairs.first);
                    write(to + VALUE_TILES, pairs.second);
                }
            }
        }
    }

    // Turns the scores of 16 lanes and the round's first `seen` keys into weights, exp(score - largest). What was summed
    // before shrinks to the new largest scores.
    void weigh(int64_t tile, int64_t from, int64_t seen) {
        float* scores = scores_ + tile % PAIR * LANES;
        const int64_t end = (seen + SCORE_STEP - 1) / SCORE_STEP * SCORE_STEP;
        const float scale = finish_scores(tile, from, seen);
        for (int64_t k = seen; k < end; k++) store(scores + k * PAIR_LANES, splat(-INFINITY));
        f32x16 tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
        for (int64_t k = 0; k < end; k += 4) {  // one by one each would wait for the one before
#pragma GCC unroll 4
            for (int64_t i = 0; i < 4; i++) tops[i] = max(tops[i], load(scores + (k + i) * PAIR_LANES));
        }
        const f32x16 top = max(largest_[tile], max(max(tops[0], tops[1]), max(tops[2], tops[3])) * scale);
        // A lane that has seen no key has no largest score: minus infinity less itself would be NaN.
        const f32x16 base = top == -INFINITY ? f32x16{} : top;
        const f32x16 shrink = weight_of(largest_[tile] - base);
        f32x16 total = totals_[tile] * shrink;
        uint32_t* weights = weights_ + tile % PAIR * LANE_TILES;
        for (int64_t k = 0; k < end; k += PACK<T>) {
            f32x16 w[PACK<T>], sum = {};
            for (int64_t e = 0; e < PACK<T>; e++) {
                // The product is not rounded before it is subtracted, as `base` is: the difference may be above 0.
                w[e] = weight_of(min(splat(0), load(scores + (k + e) * PAIR_LANES) * scale - base));
                sum += w[e];
            }
            total += sum;
            write(weights + k / PACK<T> * LANES, as_words(w, static_cast<const T*>(nullptr)));
        }
        if constexpr (HAS_TILE_UNITS<T>) {
            for (int64_t k = 0; k < seen; k += STEP<T>, weights += TILE_WORDS) {
                u32x16 words[LANES];
                memcpy(words, weights, sizeof words);
                transpose(words);
                memcpy(weights, words, sizeof words);
            }
        }
        if (has_sums_[tile / PAIR]) {
            for (int64_t r = 0; r < LANES; r++) {
                if (shrink[r] == 1.f) continue;
                float* sums = sums_of(tile) + r * width_;
                for (int64_t d = 0; d < width_; d += LANES) store(sums + d, load(sums + d) * shrink[r]);
            }
        }
        largest_[tile] = top;
        totals_[tile] = total;
    }

    // Caps scores where there is a cap, and hides from each lane the keys that it does not see. Returns by what the
    // scores are still to be multiplied.
    float finish_scores(int64_t tile, int64_t from, int64_t seen) {
        float* scores = scores_ + tile % PAIR * LANES;
        const bool is_scaled = args_.soft_cap > 0 || !(args_.scale > 0);  // so that -infinity stays that
        for (int64_t k = 0; is_scaled && k < seen; k++) {
            const f32x16 score = load(scores + k * PAIR_LANES) * args_.scale;
            store(scores + k * PAIR_LANES, args_.soft_cap > 0 ? capped(score, args_.soft_cap) : score);
        }
        const i32x16 limit = limits_[tile] - static_cast<int32_t>(from);  // counted from the round's first key
        // The keys before this one, of which there are some with a window alone, are not seen by all either.
        const i32x16 first = args_.window ? limit - static_cast<int32_t>(args_.window - 1) : i32x16{} - 1;
        const auto hide = [&](int64_t begin, int64_t end) {
            for (int64_t k = begin; k < end; k++) {
                const i32x16 key = static_cast<int32_t>(k) + i32x16{};
                const f32x16 score = load(scores + k * PAIR_LANES);
                store(scores + k * PAIR_LANES, key <= limit && key >= first ? score : splat(-INFINITY));
            }
        };
        const int64_t seen_by_all = std::clamp<int64_t>(limit[0] + 1, 0, seen);
        const int64_t first_of_all = std::clamp<int64_t>(first[LANES - 1], 0, seen);
        hide(0, first_of_all);
        hide(std::max(seen_by_all, first_of_all), seen);
        return is_scaled ? 1 : args_.scale;
    }

    static u32x16 as_words(const f32x16* w, const float*) { return (u32x16)w[0]; }
    static u32x16 as_words(const f32x16* w, const bf16*) { return narrow(Pair{w[0], w[1]}); }
};

}  // namespace VARIANT
