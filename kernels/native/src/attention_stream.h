// Attention of one query a row with up to MAX_STREAMED_HEADS query heads a KV head: decode. The keys and values of all
// KV heads pass by once, about as fast as memory gives them; nothing is laid out anew, and no tile is filled up with
// zeros.
//
// Keys are taken 16 at a time, all heads of them, so that what is read lies side by side. While a group of 16 is read,
// the next is fetched in the order of memory, a few lines at each key: products and loads overlap. The scores of 16
// keys are summed up across their vectors into one vector, so the softmax works on keys side by side; values are
// weighted in registers.
#pragma once
#include "attention_state.h"

namespace VARIANT {

constexpr int64_t GROUP_KEYS = 16;
constexpr int64_t CHUNK_KEYS = 128;          // one update of the softmax; the scores of 16 heads take 8 KiB
constexpr int64_t AHEAD_BYTES = 8 << 10;     // of keys or values, fetched before they are needed: 500 ns of memory
constexpr int64_t MAX_TIMES = 3;             // that a line is fetched

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
        const int64_t group_bytes = GROUP_KEYS * args_.kv_heads * args_.dim * sizeof(T);
        distance_ = std::clamp<int64_t>(AHEAD_BYTES / group_bytes, 1, CHUNK_KEYS / GROUP_KEYS) * GROUP_KEYS;
        times_ = std::clamp<int64_t>(2 * attention_.vectors / attention_.group, 1, MAX_TIMES);
    }

    static int64_t num_floats(const Attention<T>& attention) {
        return attention.args.heads * (attention.width + 2 * CHUNK_KEYS + LANES + attention.vectors * LANES + 1);
    }

    void run(const Unit& unit) {
        unit_ = &unit;
        heads_ = unit.num_kv_heads * unit.num_heads;
        token_bytes_ = ((unit.num_kv_heads - 1) * args_.head_stride + args_.dim) * sizeof(T);
        begin();
        for (from_ = unit.begin; from_ < unit.end; from_ += CHUNK_KEYS) {
            count_ = std::min(CHUNK_KEYS, unit.end - from_);
            for (int64_t k = 0; k < count_; k += GROUP_KEYS) score(k);
            for (int64_t head = 0; head < heads_; head++) weigh(head);
            for (int64_t k = 0; k < count_; k += GROUP_KEYS) add_values(k);
        }
        for (int64_t head = 0; head < heads_; head++) {
            const Sums sums{sums_ + head * attention_.width, largest_[head], sum(load(totals_ + head * LANES))};
            attention_.write(unit, unit.query, head, sums);
        }
    }

  private:
    // 16 keys that follow one another in a row, or their values. offsets: in elements, from `cache`. Behind the row's
    // last key that key stands again: nothing behind it is ever read.
    struct Group {
        const T* cache;
        int64_t offsets[GROUP_KEYS];
    };

    // Fetches groups in the order of memory, a few lines a step: all of them while another group is read. Of what is asked
    // of a CPU whose queue is full it drops a part: the sooner lines are read, the more often each is asked for, first far
    // ahead, then nearer.
    class Ahead {
      public:
        Ahead(const Group* groups, int64_t times, int64_t token_bytes, int64_t steps)
            : groups_(groups), times_(times), token_bytes_(token_bytes) {
            bytes_ = (GROUP_KEYS * ((token_bytes + 63) / 64) + steps - 1) / steps * 64;
            enter();
        }

        inline __attribute__((always_inline)) void step() {
#pragma GCC unroll 1
            for (int64_t i = 0; i < times_; i++) {
                // Into the second cache: keys a power of two apart push one another out of the first (twice the time).
                const char* from = at_[i] + done_;
#pragma GCC unroll 1
                for (const char* end = from + bytes_; from < end; from += 64) __builtin_prefetch(from, 0, 2);
            }
            done_ += bytes_;
            if (done_ >= token_bytes_ && key_ + 1 < GROUP_KEYS) {
                done_ -= token_bytes_;
                key_++;
                enter();
            }
        }

      private:
        void enter() {
#pragma GCC unroll 1
            for (int64_t i = 0; i < times_; i++) {
                at_[i] = reinterpret_cast<const char*>(groups_[i].cache + groups_[i].offsets[key_]);
            }
        }

        const Group* groups_;
        int64_t times_;
        int64_t token_bytes_;  // of all KV heads
        int64_t bytes_;        // a step
        int64_t key_ = 0, done_ = 0;
        const char* at_[MAX_TIMES] = {};
    };

    // What one pass over the values of a group reads.
    struct Values {
        const T* first;
        int64_t words;  // of a vector that is alone
        const int64_t* offsets;
        int64_t num_keys;
        const T* weights;  // of the first of its heads
    };

    const Attention<T>& attention_;
    const AttentionArgs& args_;
    int64_t distance_;                // keys between what is read and what is fetched
    int64_t times_;                   // that it is fetched, each time as much further ahead
    const Unit* unit_ = nullptr;
    int64_t heads_ = 0;               // of the unit; of each:
    float* sums_;                     // [width]
    float* scores_;                   // [CHUNK_KEYS]
    float* totals_;                   // [16], of the weights of every 16th key
    uint32_t* queries_;               // [vectors, 16 words], zeros behind the last dimension
    T* weights_;                      // [CHUNK_KEYS]
    float* largest_;                  // score so far
    int64_t token_bytes_ = 0;         // from a token's first KV head to the end of its last
    int64_t from_ = 0, count_ = 0;    // the chunk's keys

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

    void find(bool is_values, int64_t first, Group& group) const {
        group.cache = static_cast<const T*>(is_values ? args_.v : args_.k);
        const int64_t num_keys = std::min(GROUP_KEYS, unit_->end - first);
        const int32_t* block = args_.tables + unit_->row * args_.table_width + first / args_.block_size;
        int64_t place = first % args_.block_size;
        for (int64_t i = 0; i < num_keys; i++) {
            group.offsets[i] = *block * args_.block_stride + place * args_.token_stride;
            if (++place == args_.block_size) place = 0, block++;
        }
        for (int64_t i = num_keys; i < GROUP_KEYS; i++) group.offsets[i] = group.offsets[num_keys - 1];
    }

    void find_next(bool is_values, int64_t k, Group* next) const {
        for (int64_t i = 0; i < times_; i++) find_next(is_values, k, (i + 1) * distance_, next[i]);
    }

    // What will be read after `distance` keys more than the chunk's first k: of a chunk the keys come first, then the
    // values, then the next chunk.
    void find_next(bool is_values, int64_t k, int64_t distance, Group& next) const {
        const int64_t padded = (count_ + GROUP_KEYS - 1) / GROUP_KEYS * GROUP_KEYS;
        k += distance;
        if (k < padded) return find(is_values, from_ + k, next);
        k -= padded;
        if (is_values) return find(false, std::min(from_ + CHUNK_KEYS + k, unit_->end - 1), next);
        find(true, from_ + std::min(k, padded - GROUP_KEYS), next);
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

    // Over the keys or values of a group: two heads of a KV head at a time.
    int64_t passes() const { return unit_->num_kv_heads * ((unit_->num_heads + 1) / 2); }

    int64_t num_parts() const {
        int64_t parts = 0;
        for_parts([&](int64_t, int64_t, int64_t) { parts++; });
        return parts;
    }

    // Scores of the group at the chunk's key k, all heads.
    void score(int64_t k) {
        Group group;
        find(false, from_ + k, group);
        Group next[MAX_TIMES];
        find_next(false, k, next);
        Ahead ahead(next, times_, token_bytes_, passes() * num_parts() * GROUP_KEYS);
        for (int64_t kv_head = 0; kv_head < unit_->num_kv_heads; kv_head++) {
            const T* keys = group.cache + kv_head * args_.head_stride;
            for (int64_t h = 0; h < unit_->num_heads; h += 2) {
                const int64_t head = kv_head * unit_->num_heads + h;
                if (h + 1 < unit_->num_heads) score<2>(keys, group.offsets, head, k, ahead);
                else score<1>(keys, group.offsets, head, k, ahead);
            }
        }
    }

    template <int HEADS>
    void score(const T* keys, const int64_t* offsets, int64_t head, int64_t k, Ahead& ahead) {
        Scores<HEADS> sums = {};
        for_parts([&](int64_t v, int64_t count, int64_t words) {
            const T* from = keys + v * STEP<T>;
            const uint32_t* q = queries_ + (head * attention_.vectors + v) * LANES;
            if (count == 4) sums += score<HEADS, 4>(from, words, offsets, q, ahead);
            else if (count == 2) sums += score<HEADS, 2>(from, words, offsets, q, ahead);
            else sums += score<HEADS, 1>(from, words, offsets, q, ahead);
        });
        for (int h = 0; h < HEADS; h++) store(scores_ + (head + h) * CHUNK_KEYS + k, sums.of[h] * args_.scale);
    }

    // Some vectors of 16 keys, by as many heads; element i of a result is of key i. words: of one vector that is alone.
    template <int HEADS, int VECTORS>
    Scores<HEADS> score(const T* keys, int64_t words, const int64_t* offsets, const uint32_t* query, Ahead& ahead) const {
        u32x16 q[HEADS][VECTORS];
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) q[h][v] = read<u32x16>(query + (h * attention_.vectors + v) * LANES);
        }
        const Scores<HEADS> scores = sums_over<0, 16>([&](int k) __attribute__((always_inline)) {
            ahead.step();
            const T* key = keys + offsets[k];
            Scores<HEADS> sums = {};
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const u32x16 part = read_part<VECTORS>(key, v, words);
#pragma GCC unroll 2
                for (int h = 0; h < HEADS; h++) sums.of[h] = multiply_add(sums.of[h], part, q[h][v], key);
            }
            return sums;
        });
        return scores;
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

    // Adds the values of the group at the chunk's key k: two heads of a KV head and four vectors at a time, whose sums
    // fit into registers.
    void add_values(int64_t k) {
        Group group;
        find(true, from_ + k, group);
        const int64_t num_keys = std::min(GROUP_KEYS, count_ - k);
        Group next[MAX_TIMES];
        find_next(true, k, next);
        Ahead ahead(next, times_, token_bytes_, passes() * num_parts() * (GROUP_KEYS / PACK<T>));
        for (int64_t kv_head = 0; kv_head < unit_->num_kv_heads; kv_head++) {
            const T* first = group.cache + kv_head * args_.head_stride;
            for (int64_t h = 0; h < unit_->num_heads; h += 2) {
                const int64_t head = kv_head * unit_->num_heads + h;
                const T* weights = weights_ + head * CHUNK_KEYS + k;
                float* sums = sums_ + head * attention_.width;
                for_parts([&](int64_t v, int64_t count, int64_t words) {
                    const Values values{first + v * STEP<T>, words, group.offsets, num_keys, weights};
                    float* to = sums + v * STEP<T>;
                    if (h + 1 < unit_->num_heads) add_values<2>(count, values, to, ahead);
                    else add_values<1>(count, values, to, ahead);
                });
            }
        }
    }

    template <int HEADS>
    void add_values(int64_t vectors, const Values& values, float* sums, Ahead& ahead) const {
        if (vectors == 4) add_values<HEADS, 4>(values, sums, ahead);
        else if (vectors == 2) add_values<HEADS, 2>(values, sums, ahead);
        else add_values<HEADS, 1>(values, sums, ahead);
    }

    template <int HEADS, int VECTORS>
    void add_values(const Values& values, float* sums, Ahead& ahead) const {
        constexpr int KEYS = PACK<T>;  // of one word, and vectors of sums for one vector of values
        const int64_t width = attention_.width;
        f32x16 acc[HEADS][VECTORS * KEYS];
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS * KEYS; i++) acc[h][i] = load(sums + h * width + i * LANES);
        }
        for (int64_t k = 0; k < values.num_keys; k += KEYS) {
            ahead.step();
            const T* a = values.first + values.offsets[k];
            // An odd last key is its own partner, whose weight is 0: what lies behind it may be NaN.
            const T* b = values.first + values.offsets[k + KEYS - 1];
            u32x16 weights[HEADS];
#pragma GCC unroll 2
            for (int h = 0; h < HEADS; h++) {
                weights[h] = u32x16{} + read<uint32_t>(values.weights + h * CHUNK_KEYS + k);
            }
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
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
