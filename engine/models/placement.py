"""Where and how a model runs: device, number format, kernels and the precision of sums."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import structlog
import torch

from engine.errors import EngineFatal
from kernels import reference
from kernels.dispatch import (
    NATIVE_OFF,
    NativeChoice,
    blas_library_of,
    choose_native,
    deterministic_operations,
    int8_operations,
    operations,
)
from kernels.interface import Operations
from kernels.native.operations import native_operations
from kernels.operands import PackedWeight
from kernels.quantised import QuantisedWeight, WeightScheme, quantise
from settings import EngineSettings

_log = structlog.get_logger(__name__)

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})
# Symmetric and to the nearest: what needs no data.
INT4 = WeightScheme(4, is_float=False, group_size=128)
DTYPE_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


@dataclass(frozen=True, eq=False)
class ModelPlacement:
    """Where and how a model runs: everything about it that is not in the checkpoint."""

    device: torch.device
    dtype: torch.dtype
    ops: Operations
    max_positions: int  # rows of the rotary table: the longest sequence, in tokens
    bucketed_min_tokens: int | None  # see MoeMLP
    rounded_to: WeightScheme | None = None  # how weights that are not quantised are rounded as they are loaded
    has_float8_cache: bool = False  # keys and values are stored in e4m3

    def pack(self, weight: torch.Tensor | QuantisedWeight) -> PackedWeight:
        """Round a weight of products where the settings ask for it, and lay it out for them."""
        if self.rounded_to is not None and not isinstance(weight, QuantisedWeight):
            weight = quantise(weight, self.rounded_to)
        return self.ops.pack(weight)


def prepare_placement(settings: EngineSettings, *, max_positions: int) -> ModelPlacement:
    """Set this process's threads and the precision of its sums, and say where the model goes.

    settings: fully derived. max_positions: tokens of the longest sequence. Raises KernelsUnavailable.
    """
    if settings.num_threads is None:
        raise EngineFatal("derive_settings left engine.num_threads unset")
    torch.set_num_threads(settings.num_threads)
    require_float32_sums()
    device = torch.device(settings.device)
    choice = explain_native(settings, device)
    _log.info("kernels", native=choice.variant, reason=choice.reason)
    ops = choose_operations(settings, device)
    if library := blas_library_of(ops):
        torch.backends.cuda.preferred_blas_library(library)
    return ModelPlacement(
        device=device,
        dtype=DTYPES[settings.dtype],
        ops=ops,
        max_positions=max_positions,
        bucketed_min_tokens=settings.moe.bucketed_min_tokens if settings.moe.bucketed else None,
        rounded_to=INT4 if settings.quantization == "int4" else None,
        has_float8_cache=kv_cache_dtype(settings) is torch.float8_e4m3fn,
    )


def kv_cache_dtype(settings: EngineSettings) -> torch.dtype:
    """Of keys and values in memory, under a fully derived dtype."""
    return torch.float8_e4m3fn if settings.kv_cache.dtype == "fp8" else DTYPES[settings.dtype]


def choose_operations(settings: EngineSettings, device: torch.device) -> Operations:
    """What the settings ask for on this device. Raises KernelsUnavailable where there is no such thing."""
    if settings.quantization == "int8":
        return int8_operations(device)
    if settings.deterministic:
        return deterministic_operations(device)
    variant = explain_native(settings, device).variant
    return operations(device) if variant == NATIVE_OFF else native_operations(variant)


def explain_native(settings: EngineSettings, device: torch.device) -> NativeChoice:
    """Which native kernels these settings use on this device, or none, and why."""
    if settings.deterministic or settings.quantization == "int8":
        return NativeChoice(NATIVE_OFF, "engine.deterministic and engine.quantization=int8 have kernels of their own")
    choice = choose_native(device)
    if settings.native_kernels in ("auto", choice.variant):
        return choice
    return NativeChoice(settings.native_kernels, f"engine.native_kernels={settings.native_kernels}")


def supported_dtypes(device: torch.device) -> tuple[str, ...]:
    """What engine.dtype may ask for.

    float16 is refused on a CPU: its matrix products run at 4 GFLOP/s there, against 436 in bfloat16.
    """
    return ("float32", "bfloat16", "float16") if device.type == "cuda" else ("float32", "bfloat16")


def require_float32_sums() -> None:
    """Have cuBLAS keep float32 sums in every matrix product of this process, as `Operations.linear` promises.

    PyTorch allows it to add the partial sums of a split product in bfloat16 or float16 (both on by default), and TF32
    for float32 (off by default). The switches hold for the whole process, which the loader of a model must own.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_tf32 = False


# For a checkpoint that is only to be checked: nothing takes memory, and the reference keeps weights as they are.
SHAPES_ONLY = ModelPlacement(
    device=torch.device("meta"), dtype=torch.float32, ops=reference, max_positions=1, bucketed_min_tokens=None
)
