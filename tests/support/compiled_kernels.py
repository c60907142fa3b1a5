"""Compiles the operations' own launches ahead of time, for a GPU that is not there.

Runs on a machine without a GPU: pip's triton brings ptxas and cuobjdump. Launches go through a driver that names the
target and launches nothing, so each kernel is specialised exactly as a real call with these tensors would do it. A
second driver only records the specialisations; on a GPU, compilations are counted as they happen.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY_LIMIT_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}

_NUMBERS = count(1)


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled specialisation and what it takes."""

    name: str
    capability: int
    num_warps: int
    num_stages: int
    constants: dict[str, Any]
    registers: int
    spill_bytes: int  # STACK of cuobjdump: LOCAL stays 0 on spills
    shared_bytes: int
    ptx: str

    @property
    def num_async_copies(self) -> int:
        """cp.async of 16 bytes."""
        return len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", self.ptx))

    @property
    def uses_wgmma(self) -> bool:
        """Whether it uses Hopper's warpgroup matrix instructions."""
        return "wgmma.mma_async" in self.ptx


def check_resources(kernels: Iterable[CompiledKernel]) -> None:
    """No kernel may spill, or take more shared memory than its architecture has."""
    for kernel in kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_MEMORY_LIMIT_BYTES[kernel.capability], kernel


class _Driver(DriverBase):  # type: ignore[misc]  # triton is untyped
    """A driver that names a target and launches nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # the key of triton's cache: one device an architecture

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        return lambda fn, quantiles=None, **_: [0.0, 0.0, 0.0]

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


@contextmanager
def on_a_new_device(capability: int) -> Iterator[None]:
    """Launches go to a device for which this process has loaded no kernel; there is none, so none may run."""
    with mock.patch.object(driver, "_active", _Specialising(capability)):
        yield


@contextmanager
def compiling_for(capability: int, *, device: DriverBase | None = None) -> Iterator[list[CompiledKernel]]:
    """Compile launches for sm_<capability> and do not run them; yields the list of them, each once.

    device: in the place of the one that all tests of an architecture share.
    """
    compiled: list[CompiledKernel] = []
    seen: set[str] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}  # positional ones come first
            constants = {name: value for name, value in named.items() if name.isupper()}
            if named.get("kv_scales_ptr") is not None:  # another kernel, although no constant of it says so
                constants["KV_CACHE"] = "e4m3"
            compiled.append(_inspect(kernel, self.fn.__name__, capability, constants))
        return kernel

    target = mock.patch.object(driver, "_active", device or _Driver(capability))  # `driver.active` would look for a GPU
    with target, mock.patch.object(JITFunction, "run", compile_only):
        yield compiled


def compiled_kernels(capability: int, launches: Sequence[Callable[[], None]]) -> list[CompiledKernel]:
    """What the launches compile for sm_<capability>. For sm_89 in a process of its own: Triton 3.6 and 3.7 convert
    float8 in the form of the architecture that a process has first compiled such a conversion for.
    """
    if capability == 89:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_compile, capability, launches).result()
    return _compile(capability, launches)


def _compile(capability: int, launches: Sequence[Callable[[], None]]) -> list[CompiledKernel]:
    with compiling_for(capability) as kernels:
        for launch in launches:
            launch()
    return kernels


def _inspect(kernel: Any, name: str, capability: int, constants: dict[str, Any]) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]  # its format
    return CompiledKernel(
        name=name,
        capability=capability,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        constants=constants,
        registers=int(registers),
        spill_bytes=int(stack),
        shared_bytes=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
    )


class _Specialising(_Driver):
    """A device that no other test has: Triton keeps what is compiled for each."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self._name = f"specialising {next(_NUMBERS)}"

    def get_current_device(self) -> Any:
        return self._name


@contextmanager
def found_on_disk(capability: int) -> Iterator[list[bool]]:
    """Compile launches as a new process would; of each kernel, whether Triton's cache on the disk had it."""
    found: list[bool] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    with (
        mock.patch.object(knobs.compilation, "listener", note),
        compiling_for(capability, device=_Specialising(capability)),
    ):
        yield found


@contextmanager
def recorded_specialisations(capability: int) -> Iterator[list[str]]:
    """Names of kernels with their keys, one for each compilation that a GPU would see, in their order.

    Nothing runs: what kernels would have written is zeros.
    """
    recorded: list[str] = []
    run = JITFunction.run

    def never_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def never_compile(self: Any, key: Any, signature: Any, device: Any, *_: Any) -> object:
        recorded.append(f"{self.fn.__name__} {key}")
        kernel = object()
        self.device_caches[device][0][key] = kernel
        return kernel

    with (
        mock.patch.object(driver, "_active", _Specialising(capability)),
        mock.patch.object(JITFunction, "run", never_launch),
        mock.patch.object(JITFunction, "_do_compile", never_compile),
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
    ):
        yield recorded


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The kernels compiled within the block, each with its launch; none under the interpreter."""
    compiled: list[str] = []

    def note(*, repr: str, **_: Any) -> None:  # the name is Triton's
        compiled.append(repr)

    with mock.patch.object(knobs.runtime, "jit_post_compile_hook", note):
        yield compiled
