"""Errors about memory name the settings that use less of it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from engine.engine import Engine
from engine.errors import CapabilityError, EngineFatal
from engine.execution.decode_graphs import DecodeRun
from engine.execution.forward import StepExecutor
from engine.out_of_memory import is_out_of_memory, naming_settings, step_failure
from tests.support.engines import StaticRunner, greedy_request, load_engine, load_static_engine
from tests.support.tiny_checkpoint import make_checkpoint

GPU_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB.\nSee documentation."


def _cpu_error() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    return caught.value


def _engine(tmp_path: Path) -> Engine:
    engine = load_engine(make_checkpoint(tmp_path, num_hidden_layers=1))
    engine.add_request(greedy_request("request", [1, 2, 3], 8))
    return engine


def test_gpu_and_host_have_errors_of_their_own() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(GPU_SAYS))
    assert is_out_of_memory(_cpu_error())
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_what_runs_out_outside_the_allocator_is_known_by_its_text(tmp_path: Path, error: RuntimeError) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1)
    assert is_out_of_memory(error)
    with pytest.raises(CapabilityError, match="the decode graphs"):
        load_static_engine(tmp_path, _FullGpu(error))


def test_what_was_allocated_is_named_with_its_size_and_the_settings() -> None:
    with (
        pytest.raises(
            CapabilityError, match=r"out of memory for the KV pool, 7 bytes \(CUDA out of .* 80 GiB\.\): low"
        ),
        naming_settings("the KV pool", 7, "lower engine.kv_cache.num_blocks"),
    ):
        raise torch.OutOfMemoryError(GPU_SAYS)


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="other"), naming_settings("the KV pool", 7, ""):
        raise ValueError("other")


@pytest.mark.parametrize(
    ("device", "setting"), [("cuda", "engine.gpu_memory_utilization"), ("cpu", "engine.kv_cache.memory_fraction")]
)
def test_a_step_that_ran_out_of_memory_names_what_sizes_the_pool(device: str, setting: str) -> None:
    said = str(step_failure(torch.OutOfMemoryError(GPU_SAYS), torch.device(device)))
    assert setting in said
    assert "engine.max_num_batched_tokens or engine.max_num_seqs" in said
    assert "See documentation" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(GPU_SAYS), "a step ran out of memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "AcceleratorError: CUDA err"),
    ],
)
def test_a_step_that_fails_on_the_device_ends_the_engine(tmp_path: Path, error: Exception, said: str) -> None:
    engine = _engine(tmp_path)

    def fail(*_: object) -> None:
        raise error

    with mock.patch.object(StepExecutor, "execute", fail), pytest.raises(EngineFatal, match=said):
        engine.step()
    assert engine.model_interface.status().state == "failed"


def test_weights_for_which_there_is_no_memory_are_named(tmp_path: Path) -> None:
    with (
        mock.patch("engine.loading.load.load_decoder", side_effect=torch.OutOfMemoryError(GPU_SAYS)),
        pytest.raises(CapabilityError, match=r"out of memory for the weights, \d{5,} bytes"),
    ):
        _engine(tmp_path)


class _FullGpu(StaticRunner):
    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self._error = error

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        raise self._error


def test_graphs_for_which_there_is_no_memory_are_no_reason_to_run_eagerly(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1)
    with pytest.raises(CapabilityError, match=r"the decode graphs .* lower engine\.gpu_memory_utilization"):
        load_static_engine(tmp_path, _FullGpu(torch.OutOfMemoryError(GPU_SAYS)))
