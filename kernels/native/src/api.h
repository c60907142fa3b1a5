// What Python calls: pointers and sizes in plain structures, nothing of PyTorch. Strides are in elements, not bytes.
// kernels/native/library.py repeats these structures for ctypes; a test compares their sizes.
#pragma once
#include <cstdint>

struct GemmArgs {  // c = a b^T for each run of rows, with the run's own b; bfloat16
    const void* a;
    int64_t lda;
    const int64_t* gather;  // row r reads a's row gather[r] / gather_divisor; null: row r
    int64_t gather_divisor;
    const void* b;  // packed by pack_weight
    int64_t b_stride;  // from one run's weight to the next
    const int64_t* offsets;  // run i has the rows offsets[i] .. offsets[i + 1] - 1; null: one run
    int64_t runs;
    int64_t rows;
    int64_t n;  // rows of the weight: columns of the product
    int64_t k;
    void* c;
    int64_t ldc;
    const int64_t* scatter;  // row r is written to c's row scatter[r]; null: row r
    int64_t gated;  // the weight is a gate above an up projection: c [rows, n / 2] is silu(gate) * up
    // All that follows is of a quantised weight, b_stride then is in bytes.
    int64_t format;  // 0: not quantised; 1: 4 bits, 2: int8, 3: float8 e4m3, 4: int8 with activations of 8 bits
    int64_t is_float;  // a and c are float32
    int64_t group;  // of the summed dimension, shares a scale; a multiple of 16, or k and more
    const void* scales;  // [runs, strips of 16 columns, groups, 16]; format 4: [runs, columns, rounded up to 32]
    int64_t scale_type;  // 0: float32, 1: bfloat16, 2: float16; format 4: float32
    int64_t scale_stride;  // from one run to the next
    const void* zeros;  // as the scales, uint8 beside 4 bits and int8 beside 8; null: none. Strides as of the scales.
    const int32_t* column_sums;  // of format 4: [runs, columns, rounded up to 32], strides as of the scales
};

struct PackArgs {  // values of one quantised matrix -> strips of 16 columns
    const void* values;  // [n, k / 2] of 4 bits, the even one in the lower half; else [n, k]
    int64_t n;
    int64_t k;
    int64_t format;
    void* packed;  // [n, rounded up to 32][k, rounded up to 32; format 4: to 64], filled with zeros
    int32_t* column_sums;  // of format 4
};

struct NormArgs {  // out = rms_norm(x) or, with a residual, residual += x and out = rms_norm(residual)
    const void* x;
    int64_t x_stride;
    void* residual;  // null: none
    int64_t residual_stride;
    const void* weight;
    float eps;
    int64_t rows;
    int64_t width;
    void* out;  // [rows, width]
    int64_t is_float;
};

struct RopeArgs {
    const void* qkv;  // [tokens, (heads + 2 kv_heads) * dim], rows qkv_stride apart
    int64_t qkv_stride;
    int64_t tokens;
    int64_t heads;
    int64_t kv_heads;
    int64_t dim;
    const void* q_weight;  // null: no norm
    const void* k_weight;
    float eps;
    const float* cos_sin;  // [positions, dim]
    const int64_t* positions;
    const int64_t* slots;  // below 0: nothing is written
    void* k_cache;  // [slots, kv_heads, dim]
    void* v_cache;
    void* q_out;  // [tokens, heads, dim]
    int64_t is_float;
};

struct AttentionArgs {
    const void* q;  // [queries, heads, dim], queries q_stride apart
    const void* k;  // [blocks, block_size, kv_heads, dim] by the strides below, and v the same
    const void* v;
    int64_t is_float;
    int64_t heads;
    int64_t kv_heads;
    int64_t dim;
    int64_t block_size;
    int64_t q_stride;
    int64_t block_stride;
    int64_t token_stride;
    int64_t head_stride;
    const int32_t* tables;  // [rows, table_width]: the row's blocks
    int64_t table_width;
    const int32_t* starts;  // [rows + 1]: queries starts[i] .. starts[i + 1] - 1 are row i's, the last of its keys
    const int32_t* lens;  // [rows]: keys
    int64_t rows;
    const int64_t* groups;  // [num_groups, 3]: first row, number of rows, keys that they share
    int64_t num_groups;
    int64_t window;  // keys that a query sees, its own the last; 0: all before it
    float scale;
    float soft_cap;  // c: a score s becomes c tanh(s / c); 0: it stays
    const float* sinks;  // [heads]: a score more, of no value; null: none
    void* out;  // [queries, heads, dim]
};

struct SiluArgs {  // out [rows, width] = silu(gate) * up; a row of gate_up holds both, gate first
    const void* gate_up;
    int64_t stride;
    int64_t rows;
    int64_t width;
    void* out;
    int64_t is_float;
};

struct CombineArgs {  // out [tokens, width] = sum over a token's choices of its row times its weight
    const void* values;
    int64_t stride;
    const int32_t* places;  // [tokens, choices]: each pair's row of `values`; null: pair p has row p
    const float* weights;  // [tokens, choices]
    int64_t tokens;
    int64_t choices;
    int64_t width;
    void* out;
    int64_t is_float;
};

struct RouteArgs {
    const void* logits;  // [tokens, experts], rows `stride` apart
    int64_t stride;
    int64_t tokens;
    int64_t experts;
    int64_t choices;
    int64_t renormalise;
    float* weights;  // [tokens, choices]
    int64_t* ids;
    int64_t is_float;
    // The pairs of a token and a choice in the order of their experts; null: not wanted.
    int64_t* pairs;  // [tokens * choices]
    int64_t* offsets;  // [experts + 1]: expert e has the pairs of places offsets[e] .. offsets[e + 1] - 1
    int32_t* places;  // [tokens * choices]: of each pair
};

struct Truncation {
    const int64_t* top_k;  // [rows], as many as there are elements or more: off; null: all are off
    const float* top_p;  // [rows], 1: off
    const float* min_p;  // [rows], 0: off

    struct Limits {
        int64_t top_k;
        float top_p;
        float min_p;
    };

    Limits of(int64_t row) const { return {top_k[row], top_p[row], min_p[row]}; }
    bool is_on(int64_t row, int64_t width) const {
        return top_k && (top_k[row] < width || top_p[row] < 1 || min_p[row] > 0);
    }
};

struct TruncateArgs {
    float* logits;  // [rows, width], rows `stride` apart, in place
    int64_t stride;
    int64_t rows;
    int64_t width;
    Truncation truncation;
};

struct ChooseArgs {
    const void* logits;  // [rows, width], rows `stride` apart
    int64_t stride;
    int64_t rows;
    int64_t width;
    const uint8_t* is_known;  // [width]: 0 where an element is not to be found
    const float* temperatures;  // [rows], 0: no draw
    const int64_t* seeds;  // [rows]
    const int64_t* positions;  // [rows]
    Truncation truncation;  // of (logit - largest) / temperature, before noise is added
    int64_t* ids;  // [2, rows]: of the largest or the drawn; the second is -1 where a row is not sound, which draws nothing
    int64_t is_float;
};

struct Kernels {  // one variant's
    const char* name;
    void (*pack_weight)(const void* weight, int64_t n, int64_t k, void* packed);
    void (*gemm)(const GemmArgs*);
    void (*pack_quantised)(const PackArgs*);  // null in base on x86-64, whose gemm then takes no quantised weight
    void (*norm)(const NormArgs*);
    void (*rope)(const RopeArgs*);
    void (*attention)(const AttentionArgs*);  // null in base and avx2
    void (*silu_and_mul)(const SiluArgs*);
    void (*combine)(const CombineArgs*);
    void (*route)(const RouteArgs*);
    void (*choose)(const ChooseArgs*);
    void (*truncate)(const TruncateArgs*);
};
