"""Launch parameters of the grouped matrix product."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.triton.moe_launch import power_of_two_from

SHARED_MEMORY_BYTES = {80: 166_912, 90: 232_448}
# Of every other NVIDIA GPU since Ampere (sm_86, sm_89, sm_120 have this, the others more).
LEAST_SHARED_MEMORY_BYTES = 101_376


@dataclass(frozen=True)
class GroupedGemmLaunch:
    """Tile, order and pipeline of a grouped matrix product."""

    block_m: int  # rows of a tile, all of one expert
    block_n: int  # output features of a tile
    block_k: int  # depth of a step
    group_m: int  # tiles along m that run beside each other before the next along n
    num_warps: int
    num_stages: int
    swap_ab: bool  # multiply weight by tokens transposed: wgmma needs 64 rows, and the weight has them


# H200, bfloat16, E = 128, top 8, I = 768 (Qwen3-30B-A3B): number of tokens -> block_m, block_n, block_k, group_m,
# warps, stages. Tuned on an H200 by vLLM (its fused_moe file "E=128,N=768,device_name=NVIDIA_H200"; SGLang ships the
# same) for both products of the layer, without swapping; both projects swap below 64 rows since.
_H200_TABLE = {
    1: (16, 64, 64, 1, 4, 5),
    2: (16, 64, 64, 1, 4, 4),
    4: (16, 64, 128, 16, 4, 2),
    8: (16, 64, 128, 1, 4, 3),
    16: (16, 64, 256, 1, 4, 2),
    24: (16, 64, 128, 1, 4, 4),
    32: (16, 64, 128, 16, 4, 2),
    48: (16, 128, 128, 16, 4, 3),
    64: (16, 256, 128, 1, 8, 2),
    96: (16, 128, 128, 1, 4, 2),
    128: (16, 128, 128, 1, 4, 2),
    256: (32, 256, 128, 16, 4, 2),
    512: (64, 128, 64, 1, 4, 3),
    1024: (128, 256, 64, 16, 8, 4),
    1536: (128, 256, 64, 1, 8, 4),
    2048: (128, 256, 64, 16, 8, 4),
}


def grouped_gemm_launch(
    num_pairs: int, top_k: int, num_experts: int, *, itemsize: int, capability: int
) -> GroupedGemmLaunch:
    """num_pairs rows in all, top_k of them a token; itemsize of the model dtype in bytes."""
    num_tokens = num_pairs // top_k
    if itemsize == 4:  # float32 has no tensor cores at full precision: a tile that plain multiply-adds can hold
        launch = GroupedGemmLaunch(16 if num_tokens <= 64 else 32, 64, 32, 1, 4, 2, swap_ab=False)
    elif capability == 90 and (num_experts, top_k) == (128, 8):
        launch = _tuned(num_tokens)
    else:
        launch = _derived(num_tokens, num_pairs / num_experts, capability)
    return _within_shared_memory(launch, itemsize, capability)


def _tuned(num_tokens: int) -> GroupedGemmLaunch:
    nearest = min(_H200_TABLE, key=lambda tokens: abs(tokens - num_tokens))
    block_m, block_n, block_k, group_m, num_warps, num_stages = _H200_TABLE[nearest]
    return GroupedGemmLaunch(block_m, block_n, block_k, group_m, num_warps, num_stages, swap_ab=block_m < 64)


def _derived(num_tokens: int, rows_per_expert: float, capability: int) -> GroupedGemmLaunch:
    """For what nobody tuned.

    block_m is twice the mean number of rows an expert gets, so that most experts are one tile and their weight is read
    once: with uniform routing of 256 tokens over 128 experts 16 rows make 184 tiles and 32 make 128. This rule gives
    the block_m of every line of the H200 table. The rest is vLLM's default for bfloat16, and the 256 columns of
    triton_kernels where Hopper's wgmma can hold them.
    """
    block_m = min(max(power_of_two_from(round(2 * rows_per_expert)), 16), 128)
    group_m = 16 if rows_per_expert > 128 else 1
    if block_m == 16:
        block_n = 64 if num_tokens <= 64 else 128
        return GroupedGemmLaunch(16, block_n, 128, group_m, 4, 4, swap_ab=capability == 90)
    if block_m == 32:
        return GroupedGemmLaunch(32, 128, 128, group_m, 4, 3, swap_ab=capability == 90)
    if block_m == 64:
        return GroupedGemmLaunch(64, 128, 64, group_m, 4, 3, swap_ab=False)
    if capability == 90:
        return GroupedGemmLaunch(128, 256, 64, group_m, 8, 4, swap_ab=False)
    return GroupedGemmLaunch(128, 128, 64, group_m, 8, 3, swap_ab=False)


def _within_shared_memory(launch: GroupedGemmLaunch, itemsize: int, capability: int) -> GroupedGemmLaunch:
    stage_bytes = (launch.block_m + launch.block_n) * launch.block_k * itemsize
    limit_bytes = SHARED_MEMORY_BYTES.get(capability, LEAST_SHARED_MEMORY_BYTES)
    return replace(launch, num_stages=max(min(launch.num_stages, limit_bytes // stage_bytes), 1))
