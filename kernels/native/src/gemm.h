// Matrix products with packed weights, one for each run of rows: a dense layer is a single run, experts are many.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include <omp.h>

#include "api.h"
#include "scratch.h"
#include "tiles.h"

namespace VARIANT {

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// weight [N, K] -> [N / 16][K / 32][16][16][2], both rounded up and filled with zeros: for each strip of 16 columns of the
// product, the right tiles of the summed dimension one behind the other.
inline void pack_weight(const bf16* weight, int64_t n, int64_t k, bf16* packed) {
    const int64_t depth = round_up(k, STEP<bf16>);
#pragma omp parallel for
    for (int64_t strip = 0; strip < round_up(n, 32) / 16; strip++) {
        bf16* out = packed + strip * 16 * depth;
        for (int64_t from = 0; from < k; from += STEP<bf16>, out += TILE<bf16>) {
            u32x16 rows[16] = {};
            const int64_t width = std::min(k - from, STEP<bf16>);
            for (int64_t r = 0; r < std::min<int64_t>(n - strip * 16, 16); r++) {
                memcpy(&rows[r], weight + (strip * 16 + r) * k + from, width * sizeof(bf16));
            }
            transpose(rows);
            memcpy(out, rows, sizeof rows);
        }
    }
}

// What products of every kind share: who multiplies which rows by which strips, the rows as left tiles, the results.
// T: of the result; In: of the rows as they are multiplied.
template <class T, class In = T>
class GemmTasks {
  public:
    explicit GemmTasks(const GemmArgs& args)
        : g_(args),
          depth_(round_up(args.k, std::max(STEP<In>, STEP<bf16>))),
          columns_(args.gated ? args.n / 2 : args.n),
          strips_(round_up(columns_, args.gated ? 16 : 32) / (args.gated ? 16 : 32)) {}

  protected:
    // A block of one run's rows times some strips of its weight. A strip is 32 columns of the product or, where it is gated,
    // 16 of the gate and the same 16 of the up projection.
    struct Task {
        int64_t run, row, rows, strip, strips;
    };

    static constexpr int64_t MAX_ROWS = 512;
    static constexpr int64_t BLOCK_ELEMENTS = (1 << 19) / sizeof(In);  // of a block's rows: half of a second cache of 1 MiB
#ifdef USE_AMX
    static constexpr int64_t MIN_SHARING_BLOCKS = 4;  // with fewer the CPU fetches as fast by itself, by a prototype's figures
#else
    static constexpr int64_t MIN_SHARING_BLOCKS = 2;
#endif
    static constexpr int64_t DEPTH = 32;  // steps of the summed dimension in one pass over the rows, at most
    static constexpr int64_t TASKS_PER_THREAD = 6;  // so that a thread that is late holds up the others by little

    // Calls multiply(task, strip, rows, sums) for all strips of all tasks, on all threads. rows: the task's, as `pack_rows`
    // lays them out; sums: room for 32 columns of them. begin(task, rows): once for each block of rows before.
    template <class Begin, class Multiply>
    void run(Begin begin, Multiply multiply) const {
        const std::vector<Task> tasks = plan(omp_get_max_threads());
        std::atomic<size_t> next{0};
#pragma omp parallel
        {
            [[maybe_unused]] Tiles tiles;
            static thread_local Scratch<In> rows_of_thread;
            static thread_local Scratch<float> sums_of_thread;
            const Task* packed = nullptr;
            for (size_t i; (i = next++) < tasks.size();) {
                const Task& task = tasks[i];
                const int64_t height = round_up(task.rows, 16);
                In* rows = rows_of_thread.reserve(height * depth_);
                float* sums = sums_of_thread.reserve(height * 32);
                if (!packed || packed->run != task.run || packed->row != task.row) begin(task, rows);
                packed = &task;
                for (int64_t s = task.strip; s < task.strip + task.strips; s++) multiply(task, s, rows, sums);
            }
        }
    }

    // Blocks of rows that stay in the second cache; where these are too few for the threads, parts of the columns.
    std::vector<Task> plan(int64_t threads) const {
        const int64_t most = std::clamp<int64_t>(BLOCK_ELEMENTS / depth_ / 32 * 32, 128, MAX_ROWS);
        std::vector<Task> blocks;
        for (int64_t run = 0; run < g_.runs; run++) {
            const int64_t begin = g_.offsets ? g_.offsets[run] : 0;
            const int64_t end = g_.offsets ? g_.offsets[run + 1] : g_.rows;
            const int64_t parts = (end - begin + most - 1) / most;
            const int64_t size = parts ? round_up((end - begin + parts - 1) / parts, 32) : 0;
            for (int64_t row = begin; row < end; row += size) {
                blocks.push_back({run, row, std::min(size, end - row), 0, strips_});
            }
        }
        if (blocks.empty()) return blocks;
        const int64_t wanted = (TASKS_PER_THREAD * threads + blocks.size() - 1) / blocks.size();
        const int64_t cuts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(strips_ / 4, 1));
        std::vector<Task> tasks;
        for (const Task& block : blocks) {
            for (int64_t cut = 0; cut < cuts; cut++) {
                const int64_t from = strips_ * cut / cuts, to = strips_ * (cut + 1) / cuts;
                tasks.push_back({block.run, block.row, block.rows, from, to - from});
            }
        }
        return tasks;
    }

    // A row of `a` for a row of the result.
    int64_t source(int64_t row) const { return g_.gather ? g_.gather[row] / g_.gather_divisor : row; }

    // A task's rows as left tiles [rows / 16][K / STEP][16][STEP], zeros past their ends.
    void pack_rows(const Task& task, T* out) const {
        const int64_t steps = depth_ / STEP<T>, whole = g_.k / STEP<T>, rest = g_.k % STEP<T>;
        for (int64_t r = 0; r < round_up(task.rows, 16); r++) {
            T* to = out + r / 16 * 16 * depth_ + r % 16 * STEP<T>;
            const int64_t filled = r < task.rows ? whole : 0;
            const T* from = r < task.rows ? (const T*)g_.a + source(task.row + r) * g_.lda : nullptr;
            for (int64_t s = 0; s < filled; s++) memcpy(to + s * TILE<T>, from + s * STEP<T>, 64);
            for (int64_t s = filled; s < steps; s++) memset(to + s * TILE<T>, 0, 64);
            if (from && rest) memcpy(to + whole * TILE<T>, from + whole * STEP<T>, rest * sizeof(T));
        }
    }

    // sums [rows, 32] = a task's rows times a strip, in passes over the rows. done(r): the rows before r are summed, one
    // product ago, so that the tiles' stores are through.
    template <class Done>
    void multiply(const Task& task, int64_t strip, const In* rows, float* sums, Done done) const {
        const int64_t steps = depth_ / STEP<In>, height = round_up(task.rows, 16), tile_row = 16 * depth_;
        const In* weight = (const In*)g_.b + task.run * g_.b_stride;
        const In* first = weight + (g_.gated ? strip : 2 * strip) * tile_row;
        const In* second = g_.gated ? weight + (columns_ / 16 + strip) * tile_row : first + tile_row;
        const int64_t passes = (steps + DEPTH - 1) / DEPTH, most = (steps + passes - 1) / passes;
        for (int64_t s = 0; s < steps; s += most) {
            const int64_t pass = std::min(most, steps - s);
            const bool is_last = s + pass == steps;
            Right<In> b{first + s * TILE<In>, second + s * TILE<In>};
            b.jump = g_.gated || !is_last ? 0 : tile_row;  // over the other 16 columns of the strip
            fetch_next(task, strip, s, pass, b);
            for (int64_t r = 0; r < height;) {
                const int64_t n = std::min<int64_t>(32, height - r);
                const In* a = rows + r * depth_ + s * TILE<In>;
                product<In>({a, n < 32 ? nullptr : a + tile_row}, b, pass, sums + r * 32, 32, s > 0, task.rows - r);
                if (is_last && r > 0) done(r);
                r += n;
            }
        }
        done(task.rows);
    }

    // Has a pass over the rows fetch what the next one multiplies by, of this strip or the next. With one block of rows,
    // where nothing but reading the weight counts, a strip is fetched as it is read; the CPU does so for units for tiles.
    void fetch_next(const Task& task, int64_t strip, int64_t s, int64_t pass, Right<In>& b) const {
        const int64_t steps = depth_ / STEP<In>, blocks = sharing_blocks<In>(task.rows);
        const bool is_last = s + pass == steps;
        if (blocks < MIN_SHARING_BLOCKS || (is_last && strip + 1 == task.strip + task.strips)) return;
        const int64_t back = s * TILE<In>, other = g_.gated ? 0 : 16 * depth_;
        const int64_t on = is_last ? 16 * depth_ + other - back : pass * TILE<In>;
        b.next_first = b.first + on;
        b.next_second = b.second + on;
        b.lines = 16 * pass;  // the next one is as long, or by a step or two not
        b.cold = strip == task.strip && s == 0;
        b.share = std::clamp<int64_t>((b.lines + pass * (blocks - b.cold) - 1) / (pass * (blocks - b.cold)), 1, 16);
    }

    // Writes rows from .. to - 1 of a task: sums [rows, 32], rounded where kernels.cpu rounds.
    void finish(const Task& task, int64_t from, int64_t to, int64_t strip, const float* sums) const {
        const int64_t width = g_.gated ? 16 : 32, column = strip * width;
        for (int64_t r = from; r < std::min(to, task.rows); r++) {
            const int64_t row = task.row + r;
            T* out = (T*)g_.c + (g_.scatter ? g_.scatter[row] : row) * g_.ldc + column;
            const f32x16 left = load(sums + r * 32), right = load(sums + r * 32 + 16);
            const int64_t n = columns_ - column;
            // The next strip's line of the row, to be written: rows lie pages apart.
            if (strip + 1 < task.strip + task.strips) __builtin_prefetch(out + width, 1);
            if (g_.gated) {
                store(out, rounded(silu(rounded(left, out), out), out) * rounded(right, out), std::min<int64_t>(n, 16));
            } else {
                store(out, left, std::min<int64_t>(n, 16));
                if (n > 16) store(out + 16, right, std::min<int64_t>(n - 16, 16));
            }
        }
    }

    const GemmArgs& g_;
    const int64_t depth_;    // K rounded up
    const int64_t columns_;  // of the result
    const int64_t strips_;
};

class Gemm : GemmTasks<bf16> {
  public:
    using GemmTasks::GemmTasks;

    void run() const {
        GemmTasks::run([&](const Task& task, bf16* rows) { pack_rows(task, rows); },
                       [&](const Task& task, int64_t strip, const bf16* rows, float* sums) {
                           int64_t written = 0;
                           multiply(task, strip, rows, sums, [&](int64_t r) {
                               finish(task, written, r, strip, sums);
                               written = r;
                           });
                       });
    }
};

inline void gemm(const GemmArgs& args) { Gemm(args).run(); }

}  // namespace VARIANT
