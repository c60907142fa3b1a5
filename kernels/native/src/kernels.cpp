// One variant's kernels: compiled once for each instruction set, with -DVARIANT=<its name>.
#if defined(__AVX512F__) || defined(EMULATE_TILES)
#define HAS_ATTENTION  // elsewhere PyTorch's is faster, and this takes a third of the time to compile
#include "attention.h"
#endif
#include "choose.h"
#include "gemm.h"
#if defined(__AVX2__) || !defined(__x86_64__)
#define HAS_QUANTISED  // older CPUs leave it to PyTorch: pairs of vectors of 64 bytes take long to compile for them
#include "quantised_gemm.h"
#endif
#include "rows.h"

#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

using namespace VARIANT;

extern "C" const Kernels JOIN(kernels_, VARIANT) = {
    QUOTE(VARIANT),
    [](const void* weight, int64_t n, int64_t k, void* packed) { pack_weight((const bf16*)weight, n, k, (bf16*)packed); },
#ifdef HAS_QUANTISED
    [](const GemmArgs* g) { g->format ? quantised_gemm(*g) : gemm(*g); },
    [](const PackArgs* g) { pack_quantised(*g); },
#else
    [](const GemmArgs* g) { gemm(*g); },
    nullptr,
#endif
    [](const NormArgs* g) { g->is_float ? norm<float>(*g) : norm<bf16>(*g); },
    [](const RopeArgs* g) { g->is_float ? rope<float>(*g) : rope<bf16>(*g); },
#ifdef HAS_ATTENTION
    [](const AttentionArgs* g) { g->is_float ? attention<float>(*g) : attention<bf16>(*g); },
#else
    nullptr,
#endif
    [](const SiluArgs* g) { g->is_float ? silu_and_mul<float>(*g) : silu_and_mul<bf16>(*g); },
    [](const CombineArgs* g) { g->is_float ? combine<float>(*g) : combine<bf16>(*g); },
    [](const RouteArgs* g) { g->is_float ? route<float>(*g) : route<bf16>(*g); },
    [](const ChooseArgs* g) { g->is_float ? choose<float>(*g) : choose<bf16>(*g); },
    [](const TruncateArgs* g) { truncate(*g); },
};
