"""The table of compiled kernels, that a document holds the one printed, and kernels compiled ahead in processes."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import kernels.triton
from kernels.triton.compilation import compile_ahead, settle_keys
from kernels.triton.dense import rms_norm, silu_and_mul
from kernels.triton.gumbel import _rank_kernel, choose_tokens
from kernels.triton.sampling import ranked
from tests.kernels.aot.table import (
    DOCUMENTS,
    HEADINGS,
    SM_80,
    SM_89,
    SM_90,
    TABLE,
    compile_all,
    launch_each,
    markdown,
    table_rows,
)
from tests.support.compiled_kernels import (
    CompiledKernel,
    check_resources,
    compiling_for,
    found_on_disk,
    on_a_new_device,
)

SOURCES = sorted(Path(kernels.triton.__file__).parent.glob("*.py"))
# Compiles what the other tests here did not: minutes with an empty cache of triton, seconds with a full one.
pytestmark = pytest.mark.timeout(900)


def kernel_names(path: Path) -> list[str]:
    """Names of a file's jit functions that are launched: those that no jit function of any file calls."""
    return [function.name for function in jit_functions(path) if function.name not in DEVICE_FUNCTIONS]


def jit_functions(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any("triton.jit" in ast.unparse(decorator) for decorator in f.decorator_list)]


def called_names(function: ast.FunctionDef) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.id for call in calls if isinstance(call, ast.Name)}


DEVICE_FUNCTIONS = {name for path in SOURCES for function in jit_functions(path) for name in called_names(function)}


@pytest.mark.parametrize("capability", [80, 90])
def test_each_kernel_compiles_without_spills_and_within_its_memory(capability: int) -> None:
    with compiling_for(capability) as kernels:
        launch_each()
    assert {kernel.name for kernel in kernels} == {name for path in SOURCES for name in kernel_names(path)}
    check_resources(kernels)


@pytest.fixture(scope="module", params=[SM_80, SM_89, SM_90])
def compiled(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    return compile_all(request.param)


def test_every_kernel_is_compiled_for_every_architecture(compiled: list[CompiledKernel]) -> None:
    expected = {name for path in SOURCES for name in kernel_names(path)}
    assert len(expected) >= 7
    of_float8 = {
        "_quantised_gemm_kernel",
        "_round_activations_kernel",
        "qk_norm_rope_store_kv_kernel",
        "_decode_kernel",
    }
    of_float8 |= {"_prefill_kernel", "_merge_kernel", "_shared_prefix_kernel"}
    assert {kernel.name for kernel in compiled} >= (of_float8 if compiled[0].capability == 89 else expected)


def test_every_kernel_has_a_name_of_its_own_for_profiles() -> None:
    counts = Counter(name for path in SOURCES for name in kernel_names(path))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_kernel_spills_or_takes_more_memory_than_there_is(compiled: list[CompiledKernel]) -> None:
    check_resources(compiled)


def test_the_table_has_a_row_for_every_kernel_launch_and_architecture(compiled: list[CompiledKernel]) -> None:
    rows = table_rows(compiled)
    assert {(row[0], row[4]) for row in rows} == {(kernel.name, str(kernel.capability)) for kernel in compiled}
    assert len({row[:5] for row in rows}) == len(rows)
    lines = markdown(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert {line.count("|") for line in lines} == {len(HEADINGS) + 1}


@pytest.mark.parametrize("name", ["_decode_kernel", "_prefill_kernel"])
def test_attention_with_a_window_has_rows_of_its_own(compiled: list[CompiledKernel], name: str) -> None:
    rows = [row for row in table_rows(compiled) if row[0] == name]
    windowed = [row for row in rows if "WINDOW=1024" in row[1].split()]
    assert windowed
    assert not any("WINDOW=" in row[1] for row in rows if row not in windowed)


def test_the_table_kept_of_this_triton_is_the_one_printed(compiled: list[CompiledKernel]) -> None:
    kept = TABLE.search(DOCUMENTS[triton.__version__].read_text())
    assert kept is not None
    rows = [line for line in kept[0].splitlines() if line.split(" | ")[4] == str(compiled[0].capability)]
    assert rows == markdown(table_rows(compiled)).splitlines()[2:], "run python -m tests.kernels.aot.table --write"


def test_kernels_that_differ_in_shape_constants_share_a_row() -> None:
    first, second, other = (
        kernel_of(HEAD_DIM=64, BLOCK=16),
        kernel_of(100, HEAD_DIM=128, BLOCK=16),
        kernel_of(BLOCK=32),
    )
    assert table_rows([first, second, other]) == [
        ("k", "BLOCK=16 HEAD_DIM=64/128", "4", "2", "90", "40 to 100", "0", "1024", "0", "no"),
        ("k", "BLOCK=32", "4", "2", "90", "40", "0", "1024", "0", "no"),
    ]


def kernel_of(registers: int = 40, **constants: int) -> CompiledKernel:
    return CompiledKernel("k", 90, 4, 2, constants, registers, spill_bytes=0, shared_bytes=1024, ptx="")


@triton.jit  # type: ignore[untyped-decorator]  # triton is untyped
def broken_kernel(x_ptr: Any) -> None:
    x_ptr.nothing_of_this_name()


def launch_some() -> torch.Tensor:
    x = torch.ones(3, 256)
    silu_and_mul(x)
    draws = (torch.zeros(3), *torch.zeros(2, 3, dtype=torch.int64))
    return choose_tokens(rms_norm(x, torch.ones(256), 1e-6), torch.ones(256, dtype=torch.bool), *draws)[0]


def launch_and_use_what_was_written() -> None:
    token_ids = launch_some()
    assert token_ids.tolist() == [0, 0, 0]  # not what lay in the memory: it is an index of what follows


def test_launches_are_compiled_ahead_in_processes_for_all_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with on_a_new_device(90):
        first = compile_ahead(launch_and_use_what_was_written, 2)
    with found_on_disk(90) as found:
        launch_some()
    with on_a_new_device(90):
        again = compile_ahead(launch_and_use_what_was_written, 2)
    assert (first.num_cached, first.num_processes, first.failures) == (0, 2, ())
    assert found == [True] * first.num_kernels
    assert (again.num_kernels, again.num_cached, again.num_processes) == (len(found), len(found), 0)


def test_a_kernels_key_does_not_depend_on_what_was_asked_for_first() -> None:
    called_first = {"ranked": ranked, "_rank_kernel": _rank_kernel}
    keys = []
    for order in (called_first, reversed(called_first)):
        for function in called_first.values():
            function.hash, function.used_global_vals = None, {}
        unsettled = {name: called_first[name].cache_key for name in order}
        settle_keys()
        keys.append((unsettled, {name: function.cache_key for name, function in called_first.items()}))
    (first, settled), (second, settled_too) = keys
    assert settled == settled_too
    assert first["_rank_kernel"] != second["_rank_kernel"]  # or the compiler needs no settling any more


def test_what_a_process_cannot_compile_is_named_and_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def launch() -> None:
        broken_kernel[(1,)](torch.ones(1))
        silu_and_mul(torch.ones(3, 256))

    with on_a_new_device(80):
        compiled = compile_ahead(launch, 1)
    (failure,) = compiled.failures
    assert failure.startswith("broken_kernel: CompilationError: ")
    with found_on_disk(80) as found:
        silu_and_mul(torch.ones(3, 256))
    assert found == [True]
