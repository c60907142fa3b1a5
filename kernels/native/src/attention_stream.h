// Attention of one query a row with up to MAX_STREAMED_HEADS query heads a KV head: decode. The keys and values of all
// KV heads pass by once; nothing is laid out anew, and no tile is filled up with zeros.
//
// A CPU fetches by itself what is read in order, to the end of a page only, and starts anew on each. So four places of
// a row are read by turns, a key with all its heads at each: four pages start together. The scores of a turn are summed
// up across their vectors into one vector, the softmax works on the keys of a chunk side by side, and values are
// weighted in registers.
#pragma once
#include "attention_state.h"

namespace VARIANT {

constexpr int64_t STREAMS = 4;               // places of a row that are read by turns: a turn is a key at each
constexpr int64_t CHUNK_KEYS = 128;          // one update of the softmax; the scores of 16 heads take 8 KiB
constexpr int64_t AHEAD_BYTES = 2 << 10;     // at each place, fetched into the first cache before they are needed

template <class T>
class Stream {
  public:
    // memory: `num_floats` of them, for as long as units are run
    Stream(const Attention<T>& attention, float* memory) : attention_(attention), args_(attention.args) {
        const int64_t heads = args_.heads;
        sums_ = memory;
        scores_ = sums_ + heads * attention_.width;
        totals_ = scores_ + heads * CHUNK_KEYS;
        queries_ = reinterpret_cast<uint32_t*>(totals_ + heads * LANES);
        weights_ = reinterpret_cast<T*>(queries_ + heads * attention_.vectors * LANES);
        largest_ = reinterpret_cast<float*>(weights_ + heads * CHUNK_KEYS);
        // Sums stay in registers for a pass: the more heads share a key, the more they weigh than the order of memory.
        pass_keys_ = attention_.group <= 2 ? STREAMS : 2 * STREAMS;
        const int64_t turns = AHEAD_BYTES / (args_.kv_heads * args_.dim * sizeof(T));
        ahead_ = std::clamp(turns * STREAMS, pass_keys_, CHUNK_KEYS);
    }

    static int64_t num_floats(const Attention<T>& attention) {
        return attention.args.heads * (attention.width + 2 * CHUNK_KEYS + LANES + attention.vectors * LANES + 1);
    }

    void run(const Unit& unit) {
        unit_ = &unit;
        heads_ = unit.num_kv_heads * unit.num_heads;
        begin();
        for (int64_t from = unit.begin; from < unit.end; from += CHUNK_KEYS) {
            find(from);
            for (int64_t k = 0; k < padded_; k += STREAMS) score(k);
            for (int64_t head = 0; head < heads_; head++) weigh(head);
            for (int64_t k = 0; k < count_; k += pass_keys_) add_values(k);
        }
        for (int64_t head = 0; head < heads_; head++) {
            const Sums sums{sums_ + head * attention_.width, largest_[head], sum(load(totals_ + head * LANES))};
            attention_.write(unit, unit.query, head, sums);
        }
    }

  private:
    // What one pass over the values of a group reads.
    struct Values {
        int64_t from;   // elements from a token's first KV head on
        int64_t words;  // of a vector that is alone
        const T* const* tokens;
        int64_t num_keys;
        const T* weights;  // of the first of its heads
    };

    const Attention<T>& attention_;
    const AttentionArgs& args_;
    int64_t ahead_;                   // keys between what is read and what is fetched
    int64_t pass_keys_;               // whose values are added in one pass
    const Unit* unit_ = nullptr;
    int64_t heads_ = 0;               // of the unit; of each:
    float* sums_;                     // [width]
    float* scores_;                   // [CHUNK_KEYS]
    float* totals_;                   // [16], of the weights of every 16th key
    uint32_t* queries_;               // [vectors, 16 words], zeros behind the last dimension
    T* weights_;                      // [CHUNK_KEYS]
    float* largest_;                  // score so far
    int64_t count_ = 0, padded_ = 0;  // the chunk's keys; the same in whole turns
    // The chunk's tokens as they are read: padded_ keys, as many values, then the next chunk's keys. What fills up a
    // turn is the last key again: nothing behind it is ever read.
    const T* tokens_[3 * CHUNK_KEYS];

    void begin() {
        for (int64_t head = 0; head < heads_; head++) {
            const T* query = attention_.query(unit_->query, head);
            for (int64_t v = 0; v < attention_.vectors; v++) {
                write(queries_ + (head * attention_.vectors + v) * LANES, attention_.read_vector(query, v));
            }
            largest_[head] = -INFINITY;
        }
        memset(sums_, 0, heads_ * attention_.width * sizeof(float));
        memset(totals_, 0, heads_ * LANES * sizeof(float));
    }

    // Looks up the chunk that begins with key `from`.
    void find(int64_t from) {
        count_ = std::min(CHUNK_KEYS, unit_->end - from);
        padded_ = (count_ + STREAMS - 1) / STREAMS * STREAMS;
        find(from, tokens_);
        const T* const keys = static_cast<const T*>(args_.k);
        const T* const values = static_cast<const T*>(args_.v);
        for (int64_t i = 0; i < padded_; i++) tokens_[padded_ + i] = values + (tokens_[i] - keys);
        const T** next = tokens_ + 2 * padded_;
        if (from + CHUNK_KEYS < unit_->end) {
            find(from + CHUNK_KEYS, next);
        } else {
            std::fill(next, next + CHUNK_KEYS, next[-1]);
        }
    }

    // The keys of a chunk by turns: each place has a quarter of them. The last one to three are a turn of their own.
    void find(int64_t from, const T** to) const {
        const int64_t count = std::min(CHUNK_KEYS, unit_->end - from), turns = count / STREAMS;
        for (int64_t s = 0; s < STREAMS; s++) find(from + s * turns, turns, to + s, STREAMS);
        find(from + turns * STREAMS, count % STREAMS, to + turns * STREAMS, 1);
        for (int64_t i = count; i < CHUNK_KEYS; i++) to[i] = to[count - 1];
    }

    void find(int64_t first, int64_t num_keys, const T** to, int64_t step) const {
        const int32_t* block = args_.tables + unit_->row * args_.table_width + first / args_.block_size;
        int64_t place = first % args_.block_size;
        for (int64_t i = 0; i < num_keys; i++) {
            to[i * step] = static_cast<const T*>(args_.k) + *block * args_.block_stride + place * args_.token_stride;
            if (++place == args_.block_size) place = 0, block++;
        }
    }

    // Calls f(first vector, number of vectors, words of each) for a head's 4, 2 or 1 at a time; the last one may be short.
    template <class F>
    void for_parts(F f) const {
        const int64_t whole = attention_.vectors - (attention_.tail_words ? 1 : 0);
        for (int64_t v = 0; v < whole;) {
            const int64_t count = whole - v >= 4 ? 4 : whole - v >= 2 ? 2 : 1;
            f(v, count, LANES);
            v += count;
        }
        if (attention_.tail_words) f(whole, 1, attention_.tail_words);
    }

    // Scores of a turn of keys at the chunk's place k, all heads.
    void score(int64_t k) {
        for (int64_t kv_head = 0; kv_head < unit_->num_kv_heads; kv_head++) {
            for (int64_t h = 0; h < unit_->num_heads;) {
                const int64_t head = kv_head * unit_->num_heads + h, rest = unit_->num_heads - h;
                if (rest >= 4) score<4>(kv_head, head, k, h == 0), h += 4;
                else if (rest >= 2) score<2>(kv_head, head, k, h == 0), h += 2;
                else score<1>(kv_head, head, k, h == 0), h += 1;
            }
        }
    }

    template <int HEADS>
    void score(int64_t kv_head, int64_t head, int64_t k, bool fetches) {
        fetches ? score<HEADS, true>(kv_head, head, k) : score<HEADS, false>(kv_head, head, k);
    }

    // One, two or four heads of a KV head; the first of them fetch what is next.
    template <int HEADS, bool FETCHES>
    void score(int64_t kv_head, int64_t head, int64_t k) {
        f32x16 sums[HEADS][STREAMS] = {};
        const T* at[STREAMS];
        const char* next[STREAMS];
#pragma GCC unroll 4
        for (int s = 0; s < STREAMS; s++) {
            at[s] = tokens_[k + s] + kv_head * args_.head_stride;
            next[s] = reinterpret_cast<const char*>(tokens_[k + s + ahead_] + kv_head * args_.head_stride);
        }
        const uint32_t* query = queries_ + head * attention_.vectors * LANES;
        const auto add = [&](int64_t v, auto read_key) __attribute__((always_inline)) {
            u32x16 q[HEADS];
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) q[h] = read<u32x16>(query + (h * attention_.vectors + v) * LANES);
#pragma GCC unroll 4
            for (int s = 0; s < STREAMS; s++) {
                if constexpr (FETCHES) __builtin_prefetch(next[s] + v * 64, 0, 3);
                const u32x16 key = read_key(at[s] + v * STEP<T>);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++) sums[h][s] = multiply_add(sums[h][s], key, q[h], at[s]);
            }
        };
        const int64_t whole = attention_.vectors - (attention_.tail_words ? 1 : 0);
        for (int64_t v = 0; v < whole; v++) add(v, [](const T* from) { return read<u32x16>(from); });
        if (attention_.tail_words) {
            add(whole, [&](const T* from) { return read_words(from, attention_.tail_words); });
        }
        constexpr int REPEAT = 4 / HEADS;  // the sums of fewer heads stand several times
        const f32x16 all = sums_over<0, 16>([&](int i) __attribute__((always_inline)) {
            return sums[i / REPEAT / STREAMS][i / REPEAT % STREAMS];
        }) * args_.scale;
        const f32x16 capped_or_all = args_.soft_cap > 0 ? capped(all, args_.soft_cap) : all;
        float scores[LANES];
        if constexpr (REPEAT == 1) write(scores, capped_or_all);
        if constexpr (REPEAT == 2) write(scores, __builtin_shufflevector(capped_or_all, capped_or_all, 0, 2, 4, 6, 8, 10, 12, 14));
        if constexpr (REPEAT == 4) write(scores, __builtin_shufflevector(capped_or_all, capped_or_all, 0, 4, 8, 12));
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) memcpy(scores_ + (head + h) * CHUNK_KEYS + k, scores + h * STREAMS, 16);
    }

    template <int VECTORS>
    static inline __attribute__((always_inline)) u32x16 read_part(const T* from, int v, int64_t words) {
        return VECTORS == 1 ? read_words(from, words) : read<u32x16>(from + v * STEP<T>);
    }

    // Turns the chunk's scores of one head into weights, exp(score - largest); what was summed before shrinks to the
    // new largest score, which few chunks but the first have.
    void weigh(int64_t head) {
        float* scores = scores_ + head * CHUNK_KEYS;
        T* weights = weights_ + head * CHUNK_KEYS;
        const i32x16 place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int64_t last = (count_ - 1) / LANES * LANES;
        const f32x16 last_scores = load(scores + last);
        store(scores + last, place < int32_t(count_ - last) + i32x16{} ? last_scores : splat(-INFINITY));
        f32x16 top = load(scores);
        for (int64_t k = LANES; k < count_; k += LANES) top = max(top, load(scores + k));
        const float before = largest_[head], after = std::max(before, largest(top));
        f32x16 total = load(totals_ + head * LANES);
        if (before != after) {
            const f32x16 shrink = weight_of(splat(before - after));
            float* sums = sums_ + head * attention_.width;
            for (int64_t d = 0; d < attention_.width; d += LANES) store(sums + d, load(sums + d) * shrink);
            total *= shrink;
            largest_[head] = after;
        }
        for (int64_t k = 0; k < count_; k += LANES) {
            const f32x16 w = weight_of(load(scores + k) - after);
            total += w;
            store(weights + k, w);
        }
        store(totals_ + head * LANES, total);
    }

    // Adds the values of a pass from the chunk's place k on: two heads of a KV head and four vectors at a time, whose
    // sums fit into registers.
    void add_values(int64_t k) {
        const int64_t num_keys = std::min(pass_keys_, count_ - k);
        for (int64_t kv_head = 0; kv_head < unit_->num_kv_heads; kv_head++) {
            for (int64_t h = 0; h < unit_->num_heads; h += 2) {
                const int64_t head = kv_head * unit_->num_heads + h;
                const T* weights = weights_ + head * CHUNK_KEYS + k;
                float* sums = sums_ + head * attention_.width;
                for_parts([&](int64_t v, int64_t count, int64_t words) {
                    const int64_t from = kv_head * args_.head_stride + v * STEP<T>;
                    const Values values{from, words, tokens_ + padded_ + k, num_keys, weights};
                    float* to = sums + v * STEP<T>;
                    if (h + 1 < unit_->num_heads) add_values<2>(count, values, to);
                    else add_values<1>(count, values, to);
                });
            }
        }
    }

    template <int HEADS>
    void add_values(int64_t vectors, const Values& values, float* sums) const {
        if (vectors == 4) add_values<HEADS, 4>(values, sums);
        else if (vectors == 2) add_values<HEADS, 2>(values, sums);
        else add_values<HEADS, 1>(values, sums);
    }

    template <int HEADS, int VECTORS>
    void add_values(const Values& values, float* sums) const {
        constexpr int KEYS = PACK<T>;  // of one word, and vectors of sums for one vector of values
        const int64_t width = attention_.width;
        f32x16 acc[HEADS][VECTORS * KEYS];
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS * KEYS; i++) acc[h][i] = load(sums + h * width + i * LANES);
        }
        for (int64_t k = 0; k < values.num_keys; k += KEYS) {
            const T* a = values.tokens[k] + values.from;
            // An odd last key is its own partner, whose weight is 0: what lies behind it may be NaN.
            const T* b = values.tokens[k + KEYS - 1] + values.from;
            u32x16 weights[HEADS];
#pragma GCC unroll 2
            for (int h = 0; h < HEADS; h++) {
                weights[h] = u32x16{} + read<uint32_t>(values.weights + h * CHUNK_KEYS + k);
            }
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                for (int i = 0; i < KEYS; i++) {
                    __builtin_prefetch(values.tokens[k + i + ahead_] + values.from + v * STEP<T>, 0, 3);
                }
                ValuePairs pairs{read_part<VECTORS>(a, v, values.words), {}};
                if constexpr (KEYS == 2) pairs = pair_values(pairs.first, read_part<VECTORS>(b, v, values.words));
#pragma GCC unroll 2
                for (int h = 0; h < HEADS; h++) {
                    f32x16* to = acc[h] + v * KEYS;
                    to[0] = multiply_add(to[0], pairs.first, weights[h], a);
                    if constexpr (KEYS == 2) to[1] = multiply_add(to[1], pairs.second, weights[h], a);
                }
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS * KEYS; i++) store(sums + h * width + i * LANES, acc[h][i]);
        }
    }
};

}  // namespace VARIANT
