"""Compiles the kernels of a warm-up in several processes, and says which numbers of tokens launch the same ones.

`python -m kernels.triton.compilation` is such a process: it reads launches from its input and compiles each.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction, get_cache_invalidating_env_vars

from kernels.interface import CompiledAhead, StepShape
from kernels.triton.combine_experts import combine_launch
from kernels.triton.dense import gate_launch, norm_launch
from kernels.triton.experts import MAX_PAIRS_OF_ONE_PROGRAM, expert_count_launch, sort_launch
from kernels.triton.grouped_gemm import grouped_gemm_launch
from kernels.triton.launch import compute_capability
from kernels.triton.quantised_gemm import quantised_row_tiles


def launch_class(num_tokens: int, shape: StepShape) -> Hashable:
    """Equal for two numbers of tokens for which all operations but attention launch the same kernels."""
    rows = (
        norm_launch(num_tokens, shape.hidden_size),
        gate_launch(num_tokens, shape.intermediate_size),
        quantised_row_tiles(num_tokens) if shape.is_quantised else None,
    )
    if not shape.num_experts:
        return rows
    if shape.bucketed_min_tokens is None or num_tokens < shape.bucketed_min_tokens:
        return (*rows, "pair by pair")
    num_pairs = num_tokens * shape.top_k
    is_one_program = num_pairs <= MAX_PAIRS_OF_ONE_PROGRAM
    sizes, itemsize = (num_pairs, shape.top_k, shape.num_experts), shape.itemsize
    return (
        *rows,
        sort_launch(num_pairs) if is_one_program else expert_count_launch(),
        *(
            grouped_gemm_launch(*sizes, itemsize=itemsize, capability=compute_capability(), gather=gather)
            for gather in (True, False)
        ),
        combine_launch(num_tokens, shape.hidden_size),
    )


def compile_ahead(run: Callable[[], None], num_processes: int) -> CompiledAhead:
    """Compile what `run` launches into Triton's cache on the disk, in up to num_processes processes of their own.

    `run` is called once, and its launches are left out: whatever they would have written is zeros. None of the
    processes touches the GPU. What one of them cannot compile fails where it is launched, with its own error.
    """
    if knobs.runtime.interpret:  # which compiles nothing
        return CompiledAhead(0, 0, 0, ())
    settle_keys()
    launches: list[Launch] = []
    with _noting(launches), _Zeroed():
        run()
    wanted = [launch for launch in launches if not _is_cached(launch)]
    queue: SimpleQueue[Launch] = SimpleQueue()
    for launch in wanted:
        queue.put(launch)
    num_processes = min(num_processes, len(wanted))
    with ThreadPoolExecutor(max(num_processes, 1), thread_name_prefix="compile") as threads:
        failures = [error for errors in threads.map(_work_off, [queue] * num_processes) for error in errors]
    return CompiledAhead(len(launches), len(launches) - len(wanted), num_processes, tuple(failures))


def settle_keys() -> None:
    """Give each kernel the key in Triton's cache that it has in every process.

    Triton takes over the constants that a called function uses before it has looked at that function, so the key of a
    caller depends on which of the two was asked for first, and a process found some of what another had compiled only
    by chance. Asked for until none changes, which is as often as calls are deep, all are as if callees came first.
    """
    package = importlib.import_module(__package__ or "")
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
    by_id = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    }
    before: list[str] = []
    while (keys := [_new_key(function) for function in by_id.values()]) != before:
        before = keys


def _new_key(function: JITFunction) -> str:
    function.hash = None  # as before it was first asked for
    return str(function.cache_key)


# A kernel's name, and its specialisation as Triton describes it in JSON.
Launch = tuple[JITFunction, Mapping[str, Any]]


@contextmanager
def _noting(launches: list[Launch]) -> Iterator[None]:
    """Note each launch that would compile, once, and leave it out."""
    known: set[tuple[JITFunction, str]] = set()

    def note(*, key: str, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        if (fn.jit_function, key) not in known:
            known.add((fn.jit_function, key))
            launches.append((fn.jit_function, compile))
        return True  # what is true is not compiled, and not launched

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        yield


class _Zeroed(TorchFunctionMode):
    """Makes tensors of zeros where uninitialised ones are asked for: what no kernel writes may be read as an index."""

    def __init__(self) -> None:
        super().__init__()
        self._instead: Mapping[Callable[..., Any], Callable[..., Any]] = {
            torch.empty: torch.zeros,
            torch.empty_like: torch.zeros_like,
            torch.Tensor.new_empty: torch.Tensor.new_zeros,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))


def _is_cached(launch: Launch) -> bool:
    """Whether the kernel lies in Triton's cache: then there is nothing for a process to do."""
    function, given = launch
    backend = make_backend(driver.active.get_current_target())
    options = json.loads(given["specialization_data"])["options"].items()
    parsed = backend.parse_options({name: tuple(v) if isinstance(v, list) else v for name, v in options})
    source = ASTSource(function, given["signature"], given["constants"], given["configs"][0])
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
    return group is not None and name in group


def _work_off(queue: SimpleQueue[Launch]) -> list[str]:
    """Have one process compile what is in the queue; the failures, each with its kernel."""
    target = json.dumps(vars(driver.active.get_current_target()))
    command = [sys.executable, "-m", __name__, target]
    failures: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while True:
            try:
                function, given = queue.get_nowait()
            except Empty:
                break
            job = (function.module, function.__name__, given["specialization_data"])
            try:
                answer = _ask(process, json.dumps(job))
            except OSError as error:  # the process is gone
                answer = str(error) or type(error).__name__
            if answer:
                failures.append(f"{function.__name__}: {answer}")
                if process.poll() is not None:
                    break
        if process.stdin is not None:
            process.stdin.close()
    return failures


def _ask(process: subprocess.Popen[str], job: str) -> str:
    """The answer to a job: an error's text, or nothing."""
    if process.stdin is None or process.stdout is None:
        raise BrokenPipeError("a process without pipes")
    process.stdin.write(f"{job}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise BrokenPipeError(f"the process that compiled it ended with {process.wait()}")
    return str(json.loads(answer))


def main() -> None:
    """Compile the launches that come in as lines, each answered by a line, for the target that is the argument."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    target = GPUTarget(**json.loads(sys.argv[1]))
    # Names the target and touches no GPU: a context in each process would take some 500 MB of its memory.
    driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: target))
    settle_keys()
    for line in sys.stdin:
        module, name, specialisation = json.loads(line)
        error = ""
        try:
            getattr(importlib.import_module(module), name).preload(specialisation)
        except Exception as raised:  # a seam: a compiler raises what it raises, and the launch will raise it again
            error = f"{type(raised).__name__}: {raised}"[:500]
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main()
