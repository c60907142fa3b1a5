// Which of the compiled variants this machine can run.
#include <cstring>

#include "api.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

extern const Kernels kernels_base;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx, kernels_amx_emulated;
#endif

}  // extern "C"

namespace {

struct Variant {
    const Kernels* kernels;
    bool runs;
};

#if defined(__x86_64__)
bool has_avx512_bf16() {  // and what came with it on all but Cooper Lake: products of bytes, tables of bytes
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1) && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi");
}

bool has_amx() {  // units for tiles, for bfloat16 and for bytes, and the system's leave for this process to use them
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#endif

}  // namespace

extern "C" {

// Sizes of what crosses the border to Python, in the order of library.py's STRUCTURES: it refuses a library of others.
extern __attribute__((visibility("default"))) const int64_t millrace_struct_bytes[], millrace_num_structs;
const int64_t millrace_struct_bytes[] = {
    sizeof(GemmArgs),    sizeof(PackArgs),  sizeof(NormArgs),   sizeof(RopeArgs),     sizeof(AttentionArgs), sizeof(SiluArgs),
    sizeof(CombineArgs), sizeof(RouteArgs), sizeof(ChooseArgs), sizeof(TruncateArgs), sizeof(Kernels),
};
const int64_t millrace_num_structs = sizeof(millrace_struct_bytes) / sizeof(int64_t);

// The kernels of that name; null where there are none or this machine cannot run them.
__attribute__((visibility("default"))) const Kernels* millrace_kernels(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    const bool bf16 = v4 && has_avx512_bf16();
    const Variant variants[] = {
        {&kernels_base, v2},           {&kernels_avx2, v3},           {&kernels_avx512, v4},
        {&kernels_avx512_bf16, bf16},  {&kernels_amx, bf16 && has_amx()}, {&kernels_amx_emulated, v3},
    };
#else
    const Variant variants[] = {{&kernels_base, true}};
#endif
    for (const Variant& each : variants) {
        if (each.runs && !strcmp(name, each.kernels->name)) return each.kernels;
    }
    return nullptr;
}

}  // extern "C"
