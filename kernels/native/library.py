"""Loads the native kernels by ctypes, and says which variants of them this machine can run."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch  # first: its OpenMP runtime serves the library too

from kernels.interface import KernelsUnavailable
from kernels.operands import ExpertLayout

# From the fastest to the slowest. The first that a machine can run is its own; the other two are chosen by name alone:
# `base` is for CPUs on which nothing was measured, `amx_emulated` runs the AMX code on plain arrays, for tests.
VARIANTS = ("amx", "avx512_bf16", "avx512", "avx2")
NAMED_VARIANTS = ("base", "amx_emulated")

HOW_TO_BUILD = "install a C++ compiler (apt-get install g++) and install millrace again"

LIBRARY = Path(__file__).with_name("libmillrace_kernels.so")


class GemmArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("a", c_void_p),
        ("lda", c_int64),
        ("gather", c_void_p),
        ("gather_divisor", c_int64),
        ("b", c_void_p),
        ("b_stride", c_int64),
        ("offsets", c_void_p),
        ("runs", c_int64),
        ("rows", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("c", c_void_p),
        ("ldc", c_int64),
        ("scatter", c_void_p),
        ("gated", c_int64),
        ("format", c_int64),
        ("is_float", c_int64),
        ("group", c_int64),
        ("scales", c_void_p),
        ("scale_type", c_int64),
        ("scale_stride", c_int64),
        ("zeros", c_void_p),
        ("column_sums", c_void_p),
    )


class PackArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("values", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int64),
        ("packed", c_void_p),
        ("column_sums", c_void_p),
    )


class NormArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("weight", c_void_p),
        ("eps", c_float),
        ("rows", c_int64),
        ("width", c_int64),
        ("out", c_void_p),
        ("is_float", c_int64),
    )


class RopeArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("q_weight", c_void_p),
        ("k_weight", c_void_p),
        ("eps", c_float),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("q_out", c_void_p),
        ("is_float", c_int64),
    )


class AttentionArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("is_float", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("block_size", c_int64),
        ("q_stride", c_int64),
        ("block_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("starts", c_void_p),
        ("lens", c_void_p),
        ("rows", c_int64),
        ("groups", c_void_p),
        ("num_groups", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("out", c_void_p),
    )


class SiluArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("stride", c_int64),
        ("rows", c_int64),
        ("width", c_int64),
        ("out", c_void_p),
        ("is_float", c_int64),
    )


class CombineArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("values", c_void_p),
        ("stride", c_int64),
        ("places", c_void_p),
        ("weights", c_void_p),
        ("tokens", c_int64),
        ("choices", c_int64),
        ("width", c_int64),
        ("out", c_void_p),
        ("is_float", c_int64),
    )


class RouteArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("tokens", c_int64),
        ("experts", c_int64),
        ("choices", c_int64),
        ("renormalise", c_int64),
        ("weights", c_void_p),
        ("ids", c_void_p),
        ("is_float", c_int64),
        ("pairs", c_void_p),
        ("offsets", c_void_p),
        ("places", c_void_p),
    )


class ChooseArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", c_int64),
        ("width", c_int64),
        ("is_known", c_void_p),
        ("temperatures", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("ids", c_void_p),
        ("is_float", c_int64),
    )


class TruncateArgs(Structure):
    """See src/api.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", c_int64),
        ("width", c_int64),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
    )


class Kernels(Structure):
    """The functions of one variant. See src/api.h."""

    _fields_ = (
        ("name", c_char_p),
        ("pack_weight", ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_void_p)),
        ("gemm", ctypes.CFUNCTYPE(None, POINTER(GemmArgs))),
        ("pack_quantised", ctypes.CFUNCTYPE(None, POINTER(PackArgs))),
        ("norm", ctypes.CFUNCTYPE(None, POINTER(NormArgs))),
        ("rope", ctypes.CFUNCTYPE(None, POINTER(RopeArgs))),
        ("attention", ctypes.CFUNCTYPE(None, POINTER(AttentionArgs))),
        ("silu_and_mul", ctypes.CFUNCTYPE(None, POINTER(SiluArgs))),
        ("combine", ctypes.CFUNCTYPE(None, POINTER(CombineArgs))),
        ("route", ctypes.CFUNCTYPE(None, POINTER(RouteArgs))),
        ("choose", ctypes.CFUNCTYPE(None, POINTER(ChooseArgs))),
        ("truncate", ctypes.CFUNCTYPE(None, POINTER(TruncateArgs))),
    )


# What crosses the border to C++; src/dispatch.cpp has them in the same order.
STRUCTURES = (
    *(GemmArgs, PackArgs, NormArgs, RopeArgs, AttentionArgs),
    *(SiluArgs, CombineArgs, RouteArgs, ChooseArgs, TruncateArgs, Kernels),
)


def load(variant: str) -> Kernels:
    """The kernels of that name.

    Raises KernelsUnavailable where the library was not built or cannot be loaded, or this machine cannot run them.
    """
    kernels = _find(variant, LIBRARY)
    if kernels is None:
        accepted = ", ".join(("auto", *available(), "off"))
        raise KernelsUnavailable("cpu", f"this machine does not run {variant}; accepted: {accepted}")
    return kernels


def available() -> tuple[str, ...]:
    """The variants that this machine can run, the fastest first, those that are chosen by name alone last.

    Raises KernelsUnavailable where the library was not built or cannot be loaded.
    """
    return tuple(name for name in (*VARIANTS, *NAMED_VARIANTS) if _find(name, LIBRARY) is not None)


@cache
def _find(variant: str, path: Path) -> Kernels | None:
    choose = _open(path).millrace_kernels
    choose.restype, choose.argtypes = POINTER(Kernels), [c_char_p]
    found = choose(variant.encode())
    return found.contents if found else None


@cache
def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise KernelsUnavailable("cpu", f"the native kernels were not built ({path.name}); {HOW_TO_BUILD}")
    try:
        library = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise KernelsUnavailable("cpu", f"the native kernels cannot be loaded: {error}; {HOW_TO_BUILD}") from error
    if _struct_bytes(library) != [ctypes.sizeof(each) for each in STRUCTURES]:
        reason = f"the native kernels ({path.name}) were built from other sources than these, which would crash"
        raise KernelsUnavailable("cpu", f"{reason}; python -m kernels.native.build, or install millrace again")
    return library


def _struct_bytes(library: ctypes.CDLL) -> list[int]:
    """Sizes of the structures as the library was compiled with them; none where it does not say."""
    try:
        count = c_int64.in_dll(library, "millrace_num_structs").value
        return list((c_int64 * count).in_dll(library, "millrace_struct_bytes"))
    except ValueError:
        return []


def gemm_args(
    x: torch.Tensor,
    packed: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor,
    layout: ExpertLayout | None,
    *,
    gather: bool,
) -> GemmArgs:
    """What every product says: x times a packed matrix [N, K] or, with a layout, each expert's rows times its own.

    shape: of the weight, [N, K] or [E, N, K]; out: [rows, N], or [rows, N / 2] where the gate is applied.
    """
    *runs, width, depth = shape
    return GemmArgs(
        a=x.data_ptr(),
        lda=x.stride(0),
        gather=pointer(layout.pair_ids) if layout is not None and gather else None,
        gather_divisor=1 if layout is None else layout.top_k,
        b=packed.data_ptr(),
        b_stride=packed.stride(0),
        offsets=None if layout is None else pointer(layout.expert_offsets),
        runs=runs[0] if runs else 1,
        rows=out.shape[0],
        n=width,
        k=depth,
        c=out.data_ptr(),
        ldc=out.shape[1],
        gated=out.shape[1] != width,
    )


def round_up(size: int, step: int) -> int:
    """The least multiple of step that is not below size."""
    return -(-size // step) * step


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor's first element."""
    return None if tensor is None else tensor.data_ptr()
