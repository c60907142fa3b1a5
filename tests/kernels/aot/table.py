"""What every kernel takes of a GPU, in every configuration that the `*_cases.py` of this folder launch.

`python -m tests.kernels.aot.table` prints the Markdown table that kernels/DESIGN.md keeps. It needs no GPU: the kernels
are compiled for sm_80 and sm_90, or taken from triton's cache where their code has not changed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from tests.support.compiled_kernels import SHARED_MEMORY_LIMIT_BYTES, CompiledKernel, compiling_for

HEADINGS = (
    *("kernel", "configuration", "warps", "stages", "sm", "registers", "spilled bytes", "shared bytes"),
    *("16-byte async copies", "wgmma"),
)
LAUNCH_CONSTANTS = ("BLOCK", "TILE", "CHUNK", "SWAP")  # how the names begin of what a launch function decides


def case_modules() -> Iterator[ModuleType]:
    """The modules whose `run_cases` launch kernels."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.endswith("_cases"):
            yield importlib.import_module(f"{__package__}.{module.name}")


def compile_all(capability: int) -> list[CompiledKernel]:
    """Every kernel that any case launches, in the order of the launches."""
    with compiling_for(capability) as kernels:
        for module in case_modules():
            module.run_cases()
    return kernels


def table_rows(kernels: Iterable[CompiledKernel]) -> list[tuple[str, ...]]:
    """One row a kernel, launch (blocks, warps, stages) and architecture.

    Kernels that differ in what the shapes decide (head size, gathered or not, dtype, divisibility) share a row, which
    names those constants and has the range of what they take.
    """
    groups: dict[tuple[str, ...], list[CompiledKernel]] = defaultdict(list)
    for kernel in kernels:
        blocks = _join(
            f"{name}={value}" for name, value in kernel.constants.items() if name.startswith(LAUNCH_CONSTANTS)
        )
        num_stages = kernel.constants.get("NUM_STAGES", kernel.num_stages)
        launch = (kernel.num_warps, num_stages, kernel.capability)
        groups[kernel.name, blocks, *(str(value) for value in launch)].append(kernel)
    return [
        (key[0], _join([key[1], _shape_constants(group)]), *key[2:], *_resources(group))
        for key, group in sorted(groups.items(), key=lambda item: item[0])
    ]


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """The rows under their headings."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shape_constants(group: list[CompiledKernel]) -> str:
    """The constants in which the kernels of a row differ, with all their values."""
    values: dict[str, dict[str, None]] = defaultdict(dict)  # ordered sets
    for kernel in group:
        for name, value in kernel.constants.items():
            values[name][str(value)] = None
    return _join(f"{name}={'/'.join(found)}" for name, found in values.items() if len(found) > 1)


def _resources(group: list[CompiledKernel]) -> tuple[str, ...]:
    wgmma = {kernel.uses_wgmma for kernel in group}
    return (
        _range(kernel.registers for kernel in group),
        _range(kernel.spill_bytes for kernel in group),
        _range(kernel.shared_bytes for kernel in group),
        _range(kernel.num_async_copies for kernel in group),
        "some" if len(wgmma) > 1 else "yes" if wgmma == {True} else "no",
    )


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _join(words: Iterable[str]) -> str:
    return " ".join(word for word in words if word)


def main() -> None:
    """Print the table of both architectures."""
    kernels = [kernel for capability in SHARED_MEMORY_LIMIT_BYTES for kernel in compile_all(capability)]
    print(markdown(table_rows(kernels)))


if __name__ == "__main__":
    main()
