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

    // Fetches a group in the order of memory, a few lines a step: all of it while another group is read.
    class Ahead {
      public:
        Ahead(const Group& group, int64_t token_bytes, int64_t steps) : group_(group), token_bytes_(token_bytes) {
            lines_ = (GROUP_KEYS * ((token_bytes + 63) / 64) + steps - 1) / steps;
            at_ = token(0);
        }

        inline __attribute__((always_inline)) void step() {
            // Into the second cache: keys a power of two apart push one another out of the first (twice the time).
            for (int64_t line = 0; line < lines_; line++) __builtin_prefetch(at_ + line * 64, 0, 2);
            at_ += lines_ * 64;
            const int64_t over = at_ - token(key_) - token_bytes_;
            if (over >= 0 && key_ + 1 < GROUP_KEYS) at_ = token(++key_) + over;
        }

        void go_on_from(const Ahead& other) {
            at_ = other.at_;
            key_ = other.key_;
        }

      private:
        const char* token(int64_t key) const {
            return reinterpret_cast<const char*>(group_.cache + group_.offsets[key]);
        }

        const Group& group_;
        int64_t token_bytes_;  // of all KV heads
        int64_t lines_;
        int64_t key_ = 0;
        const char* at_;
    };

    // What one pass over the values of a group reads.
    struct Values {
        const T* first;
        const int64_t* offsets;
        int64_t num_keys;
        const T* weights;  // of the first of its heads
    };

    const Attention<T>& attention_;
    const AttentionArgs& args_;
    int64_t distance_;                // keys between what is read and what is fetched
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

    // What will be read after `distance_` keys more than the chunk's first k: of a chunk the keys come first, then the
    // values, then the next chunk.
    void find_next(bool is_values, int64_t k, Group& next) const {
        const int64_t padded = (count_ + GROUP_KEYS - 1) / GROUP_KEYS * GROUP_KEYS;
        k += distance_;
        if (k < padded) return find(is_values, from_ + k, next);
        k -= padded;
        if (is_values) return find(false, std::min(from_ + CHUNK_KEYS + k, unit_->end - 1), next);
        find(true, from_ + std::min(k, padded - GROUP_KEYS), next);
    }

    // Calls f(first vector, number of vectors, whether it is the last one and short) for a head's 4, 2 or 1 at a time.
    template <class F>
    void for_parts(F f) const {
        const int64_t whole = attention_.vectors - (attention_.tail_words ? 1 : 0);
        for (int64_t v = 0; v < whole;) {
            const int64_t count = whole - v >= 4 ? 4 : whole - v >= 2 ? 2 : 1;
            f(v, count, false);
            v += count;
        }
        if (attention_.tail_words) f(whole, 1, true);
    }
    int64_t num_parts() const {
        int64_t parts = 0;
        for_parts([&](int64_t, int64_t, bool) { parts++; });
        return parts;
    }

    // Scores of the group at the chunk's key k, all heads.
    void score(int64_t k) {
        Group group, next;
        find(false, from_ + k, group);
        find_next(false, k, next);
        Ahead ahead(next, token_bytes_, heads_ * num_parts() * GROUP_KEYS);
        for (int64_t head = 0; head < heads_; head++) {
            const T* keys = group.cache + head / unit_->num_heads * args_.head_stride;
            const uint32_t* query = queries_ + head * attention_.vectors * LANES;
            f32x16 sums = {};
            for_parts([&](int64_t v, int64_t count, bool is_short) {
                const T* from = keys + v * STEP<T>;
                const uint32_t* q = query + v * LANES;
                if (is_short) sums += score<1, true>(from, group.offsets, q, ahead);
                else if (count == 4) sums += score<4, false>(from, group.offsets, q, ahead);
                else if (count == 2) sums += score<2, false>(from, group.offsets, q, ahead);
                else sums += score<1, false>(from, group.offsets, q, ahead);
            });
            store(scores_ + head * CHUNK_KEYS + k, sums * args_.scale);
        }
    }

    // Some vectors of one head of 16 keys; element i of the result is of key i. IS_SHORT: the one vector is.
    template <int VECTORS, bool IS_SHORT>
    f32x16 score(const T* keys, const int64_t* offsets, const uint32_t* query, Ahead& ahead) const {
        u32x16 q[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) q[v] = read<u32x16>(query + v * LANES);
        Ahead next = ahead;  // of its own, which the compiler keeps in registers
        const f32x16 scores = sums_over<0, 16>([&](int k) __attribute__((always_inline)) {
            next.step();
            const T* key = keys + offsets[k];
            f32x16 sums = {};
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums = multiply_add(sums, read_part<IS_SHORT>(key, v), q[v], key);
            return sums;
        });
        ahead.go_on_from(next);
        return scores;
    }

    template <bool IS_SHORT>
    inline __attribute__((always_inline)) u32x16 read_part(const T* from, int v) const {
        return IS_SHORT ? read_words(from, attention_.tail_words) : read<u32x16>(from + v * STEP<T>);
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
        Group group, next;
        find(true, from_ + k, group);
        find_next(true, k, next);
        const int64_t num_keys = std::min(GROUP_KEYS, count_ - k);
        const int64_t passes = unit_->num_kv_heads * ((unit_->num_heads + 1) / 2) * num_parts();
        Ahead ahead(next, token_bytes_, passes * (GROUP_KEYS / PACK<T>));
        for (int64_t kv_head = 0; kv_head < unit_->num_kv_heads; kv_head++) {
            const T* first = group.cache + kv_head * args_.head_stride;
            for (int64_t h = 0; h < unit_->num_heads; h += 2) {
                const int64_t head = kv_head * unit_->num_heads + h;
                const T* weights = weights_ + head * CHUNK_KEYS + k;
                float* sums = sums_ + head * attention_.width;
                for_parts([&](int64_t v, int64_t count, bool is_short) {
                    const Values values{first + v * STEP<T>, group.offsets, num_keys, weights};
                    float* to = sums + v * STEP<T>;
                    if (h + 1 < unit_->num_heads) add_values<2>(count, is_short, values, to, ahead);
                    else add_values<1>(count, is_short, values, to, ahead);
                });
            }
        }
    }

    template <int HEADS>
    void add_values(int64_t vectors, bool is_short, const Values& values, float* sums, Ahead& ahead) const {
        if (is_short) add_values<HEADS, 1, true>(values, sums, ahead);
        else if (vectors == 4) add_values<HEADS, 4, false>(values, sums, ahead);
        else if (vectors == 2) add_values<HEADS, 2, false>(values, sums, ahead);
        else add_values<HEADS, 1, false>(values, sums, ahead);
    }

    template <int HEADS, int VECTORS, bool IS_SHORT>
    void add_values(const Values& values, float* sums, Ahead& ahead) const {
        constexpr int KEYS = PACK<T>;  // of one word, and vectors of sums for one vector of values
        const int64_t width = attention_.width;
        Ahead next = ahead;  // of its own, which the compiler keeps in registers
        f32x16 acc[HEADS][VECTORS * KEYS];
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS * KEYS; i++) acc[h][i] = load(sums + h * width + i * LANES);
        }
        for (int64_t k = 0; k < values.num_keys; k += KEYS) {
            next.step();
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
                ValuePairs pairs{read_part<IS_SHORT>(a, v), {}};
                if constexpr (KEYS == 2) pairs = pair_values(pairs.first, read_part<IS_SHORT>(b, v));
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
        ahead.go_on_from(next);
    }
};

}  // namespace VARIANT
