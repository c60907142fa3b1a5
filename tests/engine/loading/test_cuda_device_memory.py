"""What is asked of PyTorch about a GPU's memory, and in which order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from engine.loading.memory import CudaDeviceMemory

GPU = torch.device("cuda")


def _cuda(**answers: Any) -> Any:
    return mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in answers.items()})


def test_free_and_total_are_the_drivers() -> None:
    with _cuda(mem_get_info=(3, 8)):
        memory = CudaDeviceMemory(GPU)
        assert (memory.free_bytes(), memory.total_bytes) == (3, 8)


def test_the_peak_is_what_was_reserved_once_everything_has_run() -> None:
    with _cuda(synchronize=None, max_memory_reserved=5):
        assert CudaDeviceMemory(GPU).peak_bytes() == 5
        torch.cuda.synchronize.assert_called_once_with(GPU)  # type: ignore[attr-defined]  # a Mock here


def test_a_new_peak_begins_after_what_runs_with_an_empty_cache() -> None:
    calls = mock.Mock()
    with mock.patch.multiple(
        torch.cuda,
        synchronize=calls.synchronize,
        empty_cache=calls.empty_cache,
        reset_peak_memory_stats=calls.reset_peak_memory_stats,
    ):
        CudaDeviceMemory(GPU).reset_peak()
    assert [name for name, *_ in calls.mock_calls] == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
