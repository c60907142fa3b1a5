"""Compiles the native kernels: when the package is installed, or by `python -m kernels.native.build`.

setuptools runs `BuildNative` (pyproject.toml names it). The extension is optional: where there is no compiler the
package is installed without it, and the operations run in PyTorch. Nothing is compiled at run time.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libmillrace_kernels.so"  # beside this file once it is built; kernels.native.library loads it

# The first compiler that is there, unless $CXX names one.
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors of 64 bytes are passed in memory below AVX-512: none crosses from one variant to another
    "-Wno-unknown-pragmas",
    "-Wno-uninitialized",  # in GCC 12's own header of AVX-512, and so the next
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",  # clang does not know the one before
)
_AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mprfchw", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni", "-DUSE_AVX512_BF16")
# Variant -> flags, from the oldest instruction set to the newest. They are linked in this order: of a function of the
# standard library that several of them hold the linker keeps the first, which so runs everywhere.
X86_VARIANTS = {
    "base": ("-march=x86-64-v2",),
    "avx2": ("-march=x86-64-v3",),
    "amx_emulated": ("-march=x86-64-v3", "-DUSE_AMX", "-DEMULATE_TILES", "-O1"),  # for tests: soon compiled, not fast
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DUSE_AMX"),
}
OTHER_VARIANTS: dict[str, tuple[str, ...]] = {"base": ()}


class BuildNative(build_ext):
    """The step of setuptools that builds the library into the package, and into the source tree of an editable one."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's path in the package: it is no Python module, so its name has no Python version."""
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        """Compile the library. Raises CompileError, which setuptools reports and passes over: `ext` is optional."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build(target)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)  # one of an older source
            if os.environ.get("REQUIRE_NATIVE_KERNELS") == "1":
                raise SystemExit(f"REQUIRE_NATIVE_KERNELS=1: {error}") from error
            raise CompileError(str(error)) from error


def build(target: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compile and link `src/` into the library `target`.

    Raises FileNotFoundError where there is no compiler, OSError on a system other than Linux, CalledProcessError where
    the compiler fails.
    """
    if sys.platform != "linux":
        raise OSError(f"native kernels are built on Linux alone, not on {sys.platform}")
    compiler = find_compiler()
    variants = X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else OTHER_VARIANTS
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder, f"{name}.o") for name in (*variants, "dispatch", "noise")]
        commands = [
            [*FLAGS, *flags, f"-DVARIANT={name}", "-c", str(SOURCES / "kernels.cpp")]
            for name, flags in variants.items()
        ]
        commands.append([*FLAGS, "-c", str(SOURCES / "dispatch.cpp")])
        commands.append([*FLAGS, "-ffp-contract=off", "-c", str(SOURCES / "noise.cpp")])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            steps = zip(commands, objects, strict=True)
            jobs = [pool.submit(_run, [compiler, *step, *extra_flags, "-o", str(made)]) for step, made in steps]
        for job in jobs:
            job.result()
        # The standard library is linked in; of OpenMP the process has one runtime, PyTorch's.
        link = ["-shared", "-fopenmp", "-static-libstdc++", "-static-libgcc", *extra_flags]
        made = Path(folder, LIBRARY)
        _run([compiler, *link, *map(str, objects), "-o", str(made)])
        # Renamed into its place: a process that has the old library mapped keeps it.
        staged = target.with_suffix(".new")
        shutil.copyfile(made, staged)
        staged.replace(target)


def find_compiler() -> str:
    """Path of a C++ compiler: $CXX, or the first of COMPILERS. Raises FileNotFoundError."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise FileNotFoundError(f"no C++ compiler: looked for {asked or ', '.join(COMPILERS)}")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


class _Arguments(argparse.Namespace):
    output: Path
    flags: ClassVar[list[str]] = []


def main() -> None:
    """Build the library into the source tree, or to --output with further flags (such as -fsanitize=address)."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name(LIBRARY))
    arguments, flags = parser.parse_known_args(namespace=_Arguments())
    build(arguments.output, flags)


if __name__ == "__main__":
    main()
