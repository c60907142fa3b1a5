// Products with quantised weights, which stay packed: a dense layer is a single run of rows, experts are many.
#pragma once
#include "gemm.h"
#include "quantised.h"

namespace VARIANT {

// What `scaled_block` multiplies by: 32 columns of a weight from input `begin` to `end`.
struct Columns {
    const uint8_t* values[2];  // of 16 columns each, from input `begin` on
    const char* scales[2];
    const char* zeros[2];      // null: none
    int64_t begin, end;
    uint8_t* expanded[2];      // where `Values` are kept for further rows; null: nowhere
    int64_t jump = 0;          // bytes from the end of these values to those that come next
};

template <class T>
class QuantisedGemm : GemmTasks<T> {
    using Base = GemmTasks<T>;
    using Task = typename Base::Task;
    using Base::columns_, Base::depth_, Base::g_;

  public:
    explicit QuantisedGemm(const GemmArgs& args)
        : Base(args),
          group_(std::min(args.group, depth_)),
          groups_(std::max<int64_t>((args.k + args.group - 1) / args.group, 1)),
          scale_bytes_(args.scale_type ? 2 : 4),
          excess_(args.format == INT8 ? INT8_EXCESS : 0.f),
          subtracts_(args.zeros || excess_ != 0) {}

    template <int FORMAT>
    void run() const {
        static thread_local Scratch<float> memory;  // of a row's sums of activations, one a group
        Base::run(
            [&](const Task& task, T* rows) {
                Base::pack_rows(task, rows);
                if (subtracts_) add_up(task, rows, memory.reserve(round_up(task.rows, 16) * groups_));
            },
            [&](const Task& task, int64_t strip, const T* rows, float* sums) {
                multiply<FORMAT>(task, strip, rows, memory.reserve(0), sums);
                Base::finish(task, 0, task.rows, strip, sums);
            });
    }

  private:
    // Inputs kept for more rows than a block's. Each pass loads and stores sums and begins anew, which costs 2 to 4 % with 256
    // (16 KiB of bfloat16, in the first cache); 64 KiB in the second are fetched in time. Pairs of float32 are twice as long.
#if defined(USE_AVX512_BF16)
    static constexpr int64_t PASS_INPUTS = 1024;
#else
    static constexpr int64_t PASS_INPUTS = 256;
#endif

    // Sums of each row's activations over each group [rows, groups]: zero points are subtracted that many times.
    void add_up(const Task& task, const T* rows, float* sums) const {
        for (int64_t r = 0; r < round_up(task.rows, 16); r++) {
            const T* row = rows + r / 16 * 16 * depth_ + r % 16 * STEP<T>;
            for (int64_t g = 0; g < groups_; g++) {
                const int64_t end = g + 1 < groups_ ? (g + 1) * group_ : depth_;
                f32x16 total = {};
                for (int64_t k = g * group_; k < end; k += 16) total += load(row + k / STEP<T> * TILE<T> + k % STEP<T>);
                sums[r * groups_ + g] = sum(total);
            }
        }
    }

    template <int FORMAT>
    void multiply(const Task& task, int64_t strip, const T* rows, const float* row_sums, float* sums) const {
        const int64_t strip_bytes = depth_ / VECTOR_INPUTS<FORMAT> * 64;
        const int64_t strips[2] = {g_.gated ? strip : 2 * strip, g_.gated ? columns_ / 16 + strip : 2 * strip + 1};
        Columns columns{{}, {}, {}, 0, depth_, {}};
        for (int j = 0; j < 2; j++) {
            const int64_t at = task.run * g_.scale_stride + strips[j] * groups_ * 16;
            columns.values[j] = (const uint8_t*)g_.b + task.run * g_.b_stride + strips[j] * strip_bytes;
            columns.scales[j] = (const char*)g_.scales + at * scale_bytes_;
            columns.zeros[j] = g_.zeros ? (const char*)g_.zeros + at : nullptr;
        }
        columns.jump = g_.gated ? 0 : strip_bytes;
        const bool is_few = task.rows <= BLOCK_ROWS;
#ifdef USE_AMX
        if constexpr (sizeof(T) == 2) {
            if (!is_few) return multiply_tiles<FORMAT>(task, columns, rows, sums);
        }
#endif
        memset(sums, 0, round_up(task.rows, 16) * 32 * sizeof(float));
        if (is_few) return rest_of_rows<FORMAT>(columns, rows, row_sums, sums, task.rows);
        alignas(64) uint8_t expanded[2][PASS_INPUTS / 2 * sizeof(Values)];
        for (int64_t k = 0; k < depth_; k += PASS_INPUTS) {
            Columns part = columns, again = columns;
            part.begin = again.begin = k, part.end = again.end = std::min(depth_, k + PASS_INPUTS);
            for (int j = 0; j < 2; j++) {
                part.values[j] += k / VECTOR_INPUTS<FORMAT> * 64;
                again.values[j] = part.expanded[j] = expanded[j];
            }
            part.jump = part.end < depth_ ? 0 : columns.jump;
            scaled_block<FORMAT, BLOCK_ROWS, true>(part, rows, row_sums, sums);
            for (int64_t r = BLOCK_ROWS; r < task.rows; r += BLOCK_ROWS) {
                const T* from = rows + r / 16 * 16 * depth_ + r % 16 * STEP<T>;
                rest_of_rows<EXPANDED>(again, from, row_sums + r * groups_, sums + r * 32, task.rows - r);
            }
        }
    }

    // A block of rows, or as many as are left.
    template <int FORMAT>
    void rest_of_rows(const Columns& columns, const T* rows, const float* row_sums, float* sums, int64_t count) const {
#ifdef USE_AVX512_BF16
        constexpr bool MANY_SIZES = true;
#else
        constexpr bool MANY_SIZES = false;  // they take half of the time to compile
#endif
        if constexpr (MANY_SIZES || FORMAT != EXPANDED) {
            if (count == 1) return scaled_block<FORMAT, 1>(columns, rows, row_sums, sums);
        }
        if constexpr (MANY_SIZES) {
            if (FORMAT != EXPANDED && count == 2) return scaled_block<FORMAT, 2>(columns, rows, row_sums, sums);
            if (count <= 4) return scaled_block<FORMAT, 4>(columns, rows, row_sums, sums);
        }
        scaled_block<FORMAT, BLOCK_ROWS>(columns, rows, row_sums, sums);
    }

    // What a product takes of two inputs of 16 columns, and adds to a row's sums.
    static inline __attribute__((always_inline)) auto operand(Values values) {
        if constexpr (sizeof(T) == 2) return values;
        else return as_pair(values);
    }

    static inline __attribute__((always_inline)) f32x16 add(f32x16 sum, const T* x, const Pair& values) {
        if constexpr (sizeof(T) == 4) {
            sum += x[0] * values.first;
            return sum + x[1] * values.second;
        } else {
            const uint32_t word = read<uint32_t>(x);
            sum += (f32x16)(u32x16{} + (word << 16)) * values.first;
            return sum + (f32x16)(u32x16{} + (word & 0xffff0000u)) * values.second;
        }
    }

    static inline __attribute__((always_inline)) f32x16 add(f32x16 sum, const T* x, u32x16 values) {
        return dot<bf16>(sum, read<uint32_t>(x), values);
    }

    // ROWS rows times 32 columns; there may be fewer rows, not less memory.
    template <int FORMAT, int ROWS, bool KEEPS = false>
    __attribute__((noinline)) void scaled_block(const Columns& columns, const T* rows, const float* row_sums, float* sums) const {
        constexpr int64_t INPUTS = VECTOR_INPUTS<FORMAT>, BYTES_OF = VECTOR_BYTES<FORMAT>, NEAR = 2048, FAR = 6144;
        // Fewer rows have more sums each: one after another would wait for one another.
        constexpr int PARTS = FORMAT == EXPANDED || ROWS > 2 ? 1 : 2;
        const bool is_float8 = g_.format == FLOAT8;
        const int64_t bytes = (columns.end - columns.begin) / INPUTS * BYTES_OF;
        constexpr bool IN_REGISTERS = ROWS <= 4;  // the totals; of more rows they do not fit beside the sums of a group
        f32x16 totals[ROWS][2];
        for (int r = 0; IN_REGISTERS && r < ROWS; r++) {
            for (int j = 0; j < 2; j++) totals[r][j] = load(sums + r * 32 + j * 16);
        }
        int64_t group = std::min(columns.begin / group_, groups_ - 1);
        for (int64_t k = columns.begin; k < columns.end; group++) {
            const int64_t whole = group + 1 < groups_ ? (group + 1) * group_ : depth_;
            const int64_t end = std::min(columns.end, whole);
            f32x16 acc[ROWS][2 * PARTS] = {};
            for (; k < end; k += INPUTS) {
                const int64_t at = (k - columns.begin) / INPUTS * BYTES_OF;
                const auto ahead = [&](int64_t by) { return at + by + (at + by < bytes ? 0 : columns.jump); };
                const T* x = rows + k / STEP<T> * TILE<T> + k % STEP<T>;
                Values values[2][INPUTS / 2];
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++) {
                    if constexpr (FORMAT != EXPANDED) {
                        // A CPU whose queue of fetches is full drops some: few rows come so fast that they ask twice.
                        __builtin_prefetch(columns.values[j] + ahead(NEAR), 0, 2);
                        if constexpr (ROWS <= 4) __builtin_prefetch(columns.values[j] + ahead(FAR), 0, 2);
                    }
                    expand<FORMAT>(columns.values[j] + at, values[j], is_float8);
                    if constexpr (KEEPS) {
                        memcpy(columns.expanded[j] + (k - columns.begin) / 2 * sizeof(Values), values[j], sizeof values[j]);
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < INPUTS / 2; i++) {
                    const auto left = operand(values[0][i]), right = operand(values[1][i]);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) {
                        f32x16* to = acc[r] + i % PARTS * 2;
                        to[0] = add(to[0], x + r * STEP<T> + 2 * i, left);
                        to[1] = add(to[1], x + r * STEP<T> + 2 * i, right);
                    }
                }
            }
            const bool subtracts = subtracts_ && end == whole;
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                const f32x16 scale = load_scales(columns.scales[j], group * 16, g_.scale_type);
                const f32x16 zero = subtracts ? zeros(columns, j, group) : f32x16{};
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    f32x16 total = PARTS == 1 ? acc[r][j] : acc[r][j] + acc[r][2 * PARTS - 2 + j];
                    if (subtracts) total -= zero * row_sums[r * groups_ + group];
                    float* to = sums + r * 32 + j * 16;
                    if constexpr (IN_REGISTERS) totals[r][j] += total * scale;
                    else store(to, load(to) + total * scale);
                }
            }
        }
        for (int r = 0; IN_REGISTERS && r < ROWS; r++) {
            for (int j = 0; j < 2; j++) store(sums + r * 32 + j * 16, totals[r][j]);
        }
    }

    // What is to be subtracted from the values of 16 columns.
    f32x16 zeros(const Columns& columns, int j, int64_t group) const {
        return g_.zeros ? excess_ + load_zeros(columns.zeros[j], group * 16, g_.format != INT4) : splat(excess_);
    }

#ifdef USE_AMX
    // Many rows by tiles, whose values are rounded to bfloat16 once they are scaled.
    template <int FORMAT>
    void multiply_tiles(const Task& task, const Columns& columns, const T* rows, float* sums) const {
        constexpr int64_t STEPS = 16, INPUTS = VECTOR_INPUTS<FORMAT>;
        const int64_t tile_row = 16 * depth_;
        alignas(64) T tiles[2][STEPS * TILE<T>];
        for (int64_t from = 0; from < depth_; from += STEPS * STEP<T>) {
            const int64_t end = std::min(depth_, from + STEPS * STEP<T>);
            for (int j = 0; j < 2; j++) {
                T* to = tiles[j];
                for (int64_t k = from; k < end; k += INPUTS) {
                    const int64_t group = std::min(k / group_, groups_ - 1);
                    const f32x16 scale = load_scales(columns.scales[j], group * 16, g_.scale_type);
                    const f32x16 zero = zeros(columns, j, group);
                    Values values[INPUTS / 2];
                    expand<FORMAT>(columns.values[j] + k / INPUTS * 64, values, g_.format == FLOAT8);
                    for (int i = 0; i < INPUTS / 2; i++, to += 32) {
                        const Pair pair = as_pair(values[i]);
                        write(to, narrow(Pair{(pair.first - zero) * scale, (pair.second - zero) * scale}));
                    }
                }
            }
            for (int64_t r = 0; r < task.rows; r += 32) {
                const T* a = rows + r * depth_ + from / STEP<T> * TILE<T>;
                const T* second = round_up(task.rows, 16) - r < 32 ? nullptr : a + tile_row;
                product<T>({a, second}, {tiles[0], tiles[1]}, (end - from) / STEP<T>, sums + r * 32, 32,
                           from > 0, task.rows - r);
            }
        }
    }
#endif

    const int64_t group_;   // inputs that share a scale
    const int64_t groups_;
    const int64_t scale_bytes_;
    const float excess_;     // see `INT8_EXCESS`
    const bool subtracts_;   // zero points, or that
};

// Activations rounded to 8 bits with a scale a row, and weights of 8 bits with one a column: exact sums of integers.
template <class T>
class IntegerGemm : GemmTasks<T, uint8_t> {
    using Base = GemmTasks<T, uint8_t>;
    using Task = typename Base::Task;
    using Base::columns_, Base::depth_, Base::g_;

  public:
    using Base::Base;

    void run() {
        static thread_local Scratch<uint8_t> values_memory;
        static thread_local Scratch<float> scales_memory;
        const int64_t count = g_.gather ? g_.rows / g_.gather_divisor : g_.rows;
        uint8_t* values = values_memory.reserve(count * depth_ + 64);
        float* scales = scales_memory.reserve(count + 1);
#pragma omp parallel for
        for (int64_t r = 0; r < count; r++) scales[r] = round_row((const T*)g_.a + r * g_.lda, values + r * depth_);
        Base::run(
            [&](const Task& task, uint8_t* rows) {
                const int64_t steps = depth_ / STEP<uint8_t>;
                for (int64_t r = 0; r < round_up(task.rows, 16); r++) {
                    const uint8_t* from = values + Base::source(task.row + std::min(r, task.rows - 1)) * depth_;
                    uint8_t* to = rows + r / 16 * 16 * depth_ + r % 16 * STEP<uint8_t>;
                    for (int64_t s = 0; s < steps; s++) memcpy(to + s * TILE<uint8_t>, from + s * 64, 64);
                }
            },
            [&](const Task& task, int64_t strip, const uint8_t* rows, float* sums) {
                Base::multiply(task, strip, rows, sums, [](int64_t) {});
                scale(task, strip, scales, sums);
                Base::finish(task, 0, task.rows, strip, sums);
            });
    }

  private:
    // Writes a row's integers, each more by 128, and returns their scale: the largest magnitude becomes 127, as
    // `kernels.cpu.int8.quantise_rows` does it, half to even. NaN where a value is not finite.
    float round_row(const T* row, uint8_t* to) const {
        f32x16 top = splat(1e-36f), not_finite = {};
        for_vectors(g_.k, [&](int64_t i, int64_t n) {
            const f32x16 x = load(row + i, n);
            top = max(top, max(x, -x));
            not_finite += x * 0.f;
        });
        const float most = largest(top), factor = 127 / most;
        const f32x16 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
        memset(to + g_.k / 16 * 16, 128, depth_ - g_.k / 16 * 16);
        for_vectors(g_.k, [&](int64_t i, int64_t n) {
            // The bound, which rounding may pass by a bit, also keeps the product from being added unrounded.
            const u32x16 bits = (u32x16)(max(load(row + i, n) * factor, splat(-127)) + magic) + 128;
            for (int64_t j = 0; j < n; j++) to[i + j] = uint8_t(bits[j]);
        });
        return most * (1 / 127.f) + sum(not_finite);
    }

    // int32 sums -> float32, in their place.
    void scale(const Task& task, int64_t strip, const float* row_scales, float* sums) const {
        for (int j = 0; j < 2; j++) {
            const int64_t column = g_.gated ? strip * 16 + j * columns_ : strip * 32 + j * 16;
            const int64_t at = task.run * g_.scale_stride + column;
            const f32x16 scale = load((const float*)g_.scales + at);
            const i32x16 excess = read<i32x16>(g_.column_sums + at) * 128;
            for (int64_t r = 0; r < task.rows; r++) {
                float* to = sums + r * 32 + j * 16;
                const f32x16 exact = __builtin_convertvector(read<i32x16>(to) - excess, f32x16);
                store(to, exact * (row_scales[Base::source(task.row + r)] * scale));
            }
        }
    }
};

template <class T>
void quantised_gemm_of(const GemmArgs& args) {
    if (args.format == INT4) return QuantisedGemm<T>(args).template run<INT4>();
    if (args.format == INT8) return QuantisedGemm<T>(args).template run<INT8>();
    if (args.format == FLOAT8) return QuantisedGemm<T>(args).template run<CODE_OF_FLOAT8>();
    IntegerGemm<T>(args).run();
}

inline void quantised_gemm(const GemmArgs& args) {
    args.is_float ? quantised_gemm_of<float>(args) : quantised_gemm_of<bf16>(args);
}

}  // namespace VARIANT
