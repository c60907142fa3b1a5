"""Recognises that memory ran out, and names the settings that use less of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import CapabilityError, EngineFatal

# In the text of RuntimeErrors, where there is no class for it.
OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",  # PyTorch, c10/core/impl/alloc_cpu.cpp
    "CUDA error: out of memory",  # AcceleratorError: cudaGraphInstantiate, cudaHostAlloc
    "CUBLAS_STATUS_ALLOC_FAILED",  # cublasCreate
    "Triton Error [CUDA]: out of memory",  # loading a kernel's code
)
STEP_SETTINGS = "engine.max_num_batched_tokens or engine.max_num_seqs"
WEIGHTS_ADVICE = (
    "free memory, or take a smaller model; engine.dtype=bfloat16 is half of float32, and on a CPU "
    "engine.quantization=int8 a quarter"
)
POOL_SETTINGS = {
    "cuda": "engine.gpu_memory_utilization or engine.kv_cache.num_blocks",
    "cpu": "engine.kv_cache.memory_fraction or engine.kv_cache.num_blocks",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


@contextmanager
def naming_settings(what: str, num_bytes: int, advice: str) -> Iterator[None]:
    """Turn memory that runs out within the block into a CapabilityError that names the purpose, the bytes and the
    settings to change.
    """
    try:
        yield
    except Exception as error:  # a seam: torch, NumPy, Triton and cuBLAS each say in their own way that memory is full
        if not is_out_of_memory(error):
            raise
        raise CapabilityError(
            f"out of memory for {what}, {num_bytes} bytes ({_first_line(error)}): {advice}"
        ) from error


def step_failure(error: Exception, device: torch.device) -> EngineFatal:
    """The error that a failed step raises: its engine is lost, whatever the reason."""
    said = f"a step failed: {type(error).__name__}: {error}"
    if is_out_of_memory(error):
        said = f"a step ran out of memory ({_first_line(error)}): lower {POOL_SETTINGS[device.type]}, {STEP_SETTINGS}"
    return EngineFatal(said)


def _first_line(error: BaseException) -> str:
    """Without the page of advice that PyTorch adds."""
    return str(error).partition("\n")[0] or type(error).__name__
