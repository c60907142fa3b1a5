// Cuts attention into units of work for the threads, and says where the parts of a query that several units see meet.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "api.h"

namespace VARIANT {

constexpr int64_t MAX_UNIT_LANES = 64;     // queries times heads of a unit of tiles: four tiles of lanes
// Query heads of a KV head that read keys as vectors; more do so in tiles. Of 9 heads vectors take 6.3 ns a line of the
// cache and tiles 14.8, of 16 heads 10.4 and 11.8 (bfloat16, one thread, EPYC Zen 4). Units for tiles change that.
#ifdef USE_AMX
constexpr int64_t MAX_STREAMED_HEADS = 8;
#else
constexpr int64_t MAX_STREAMED_HEADS = 16;
#endif
constexpr int64_t MIN_PART_KEYS = 128;     // of a row that is cut for the threads: a merge costs as much as a few keys
constexpr int64_t UNITS_A_THREAD = 4;      // at least, if there are enough keys: the last to end ends soon
constexpr int64_t ALL_KEYS = int64_t(1) << 30;

// Some queries over keys begin .. end - 1 of one row of the block table.
struct Unit {
    int64_t row = 0;
    int64_t begin = 0, end = 0;
    int64_t query = 0, num_queries = 0;     // indices into q
    int64_t last_key = ALL_KEYS;            // the first query sees, each next one sees one more; ALL_KEYS: no bound
    int64_t part = -1;                      // index among the parts of these queries; -1: it is the only one
    int64_t kv_head = 0, num_kv_heads = 1;  // all of them where it is streamed, else one
    int64_t first_head = 0, num_heads = 0;  // query heads of each KV head, counted from its first
    bool is_streamed = false;               // one query that reads keys as vectors
};

class Plan {
  public:
    std::vector<Unit> units;
    std::vector<int64_t> first_part;  // [queries + 1]: parts first_part[i] .. first_part[i + 1] - 1 belong to query i

    Plan(const AttentionArgs& args, int64_t num_threads)
        : args_(args),
          group_(args.heads / args.kv_heads),
          own_starts_(args.rows, 0),
          num_parts_(args.starts[args.rows], 0) {
        int64_t num_keys = 0;
        for (int64_t row = 0; row < args.rows; row++) num_keys += args.lens[row] - first_key(args.lens[row]);
        part_keys_ = std::max(num_keys / (UNITS_A_THREAD * num_threads), MIN_PART_KEYS);
        for (int64_t i = 0; i < args.num_groups; i++) add_prefix(args.groups + 3 * i);
        for (int64_t row = 0; row < args.rows; row++) add_row(row);
        first_part.push_back(0);
        for (const int64_t count : num_parts_) first_part.push_back(first_part.back() + count);
        for (Unit& unit : units) {
            if (num_parts_[unit.query] == 1) unit.part = -1;
        }
    }

    int64_t num_parts() const { return first_part.back(); }

    // Whether the query's parts, or that it has none, must be looked at when all units are done.
    bool is_cut(int64_t query) const { return num_parts_[query] != 1; }
    bool has_cuts() const {
        return std::any_of(num_parts_.begin(), num_parts_.end(), [](int64_t count) { return count != 1; });
    }

  private:
    const AttentionArgs& args_;
    const int64_t group_;              // query heads of a KV head
    int64_t part_keys_ = 0;            // a streamed row with more keys is cut
    std::vector<int64_t> own_starts_;  // [rows]: the first key after the prefix that a row shares
    std::vector<int64_t> num_parts_;   // [queries], so far

    // The first key that a query with so many keys up to its own sees.
    int64_t first_key(int64_t num_keys) const { return args_.window ? std::max<int64_t>(num_keys - args_.window, 0) : 0; }

    // Keys that the rows of a group share: all queries of these rows at once.
    void add_prefix(const int64_t* group) {
        const int64_t first = group[0], end = group[0] + group[1], num_keys = group[2];
        std::fill(own_starts_.begin() + first, own_starts_.begin() + end, num_keys);
        Unit unit;
        unit.row = first;
        unit.end = num_keys;
        unit.query = args_.starts[first];
        unit.num_queries = args_.starts[end] - unit.query;
        add_parts(unit);
    }

    // Keys that are a row's alone. A query that sees none gets no part here, and 0 when parts are merged.
    void add_row(int64_t row) {
        Unit unit;
        unit.row = row;
        unit.begin = own_starts_[row];
        unit.end = args_.lens[row];
        unit.query = args_.starts[row];
        unit.num_queries = args_.starts[row + 1] - unit.query;
        if (unit.num_queries > 1) unit.last_key = unit.end - unit.num_queries;
        else unit.begin = std::max(unit.begin, first_key(unit.end));
        if (unit.begin < unit.end) add_parts(unit);
    }

    void add_parts(Unit all) {
        if (all.num_queries == 0) return;
        all.is_streamed = all.num_queries == 1 && group_ <= MAX_STREAMED_HEADS;
        // A chunk is cut by its queries, a prefix by its KV heads and then by its keys: its queries may be few.
        const int64_t most = all.is_streamed ? part_keys_ : part_keys_ * args_.kv_heads;
        const int64_t num_keys = all.end - all.begin;
        const int64_t parts = all.last_key < ALL_KEYS ? 1 : (num_keys + most - 1) / most;
        int64_t begin = all.begin;
        for (int64_t i = 1; i <= parts; i++) {
            Unit unit = all;
            unit.begin = begin;
            // At multiples of 64, where a block begins: what is fetched ahead then is one run of memory.
            unit.end = begin = i < parts ? (all.begin + num_keys * i / parts) / 64 * 64 : all.end;
            unit.part = num_parts_[all.query];
            for (int64_t q = 0; q < all.num_queries; q++) num_parts_[all.query + q]++;
            add_heads(unit);
        }
    }

    void add_heads(Unit unit) {
        if (unit.is_streamed) {
            // All heads of a token lie side by side: read together they are one stream.
            unit.num_kv_heads = args_.kv_heads;
            unit.num_heads = group_;
            units.push_back(unit);
            return;
        }
        const int64_t num_heads = std::min(group_, MAX_UNIT_LANES);
        const int64_t num_queries = MAX_UNIT_LANES / num_heads;
        for (unit.kv_head = 0; unit.kv_head < args_.kv_heads; unit.kv_head++) {
            for (unit.first_head = 0; unit.first_head < group_; unit.first_head += num_heads) {
                unit.num_heads = std::min(num_heads, group_ - unit.first_head);
                add_queries(unit, num_queries);
            }
        }
    }

    // The last queries see the most keys and come first: what is begun last should be short.
    void add_queries(const Unit& all, int64_t step) {
        for (int64_t first = (all.num_queries - 1) / step * step; first >= 0; first -= step) {
            Unit unit = all;
            unit.query += first;
            unit.num_queries = std::min(step, all.num_queries - first);
            if (all.last_key < ALL_KEYS) {
                unit.last_key += first;
                unit.end = std::min(all.end, unit.last_key + unit.num_queries);
                unit.begin = std::max(all.begin, first_key(unit.last_key + 1));
            }
            units.push_back(unit);
        }
    }
};

}  // namespace VARIANT
