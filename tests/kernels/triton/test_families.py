"""Every family on the Triton kernels: the logits of the reference's operations, in chunks and in a decode step."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import torch

import kernels.triton
from engine.model_interface import LogitsResult
from kernels import reference
from tests.support.engines import load_engine
from tests.support.family_table import shows
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_families import FAMILY_DEFAULTS, Family

# Longer than the window that families get which have one, and than a chunk: experts are sorted in the first of these,
# and taken pair by pair in the second and in the decode step.
PROMPT = [5, 9, 60, 3, 40, 7, 12, 33, 21]
LIMITS = {
    "engine.max_num_seqs": "2",
    "engine.max_num_batched_tokens": "6",
    "engine.kv_cache.num_blocks": "6",
    "engine.moe.bucketed_min_tokens": "4",
}
WINDOW = 4
TOLERANCE = 1e-4  # of logits in float32


def logits_on(ops: ModuleType, path: Path, device: torch.device, patch: pytest.MonkeyPatch) -> torch.Tensor:
    """[2, V]: behind the prompt, and behind a token that is decoded after it."""
    if device.type == "cuda" and ops is kernels.triton:
        engine = load_engine(path, {**LIMITS, "engine.device": "cuda"})
    else:  # without a GPU every engine's tensors are a CPU's, whatever the operations
        patch.setattr("engine.models.placement.operations", lambda _: ops)
        engine = load_engine(path, {**LIMITS, "engine.native_kernels": "off"})
    interface = engine.model_interface
    results = [interface.prefill("p", PROMPT), interface.decode("p", 50, len(PROMPT))]
    logits = []
    for result in results:
        assert isinstance(result, LogitsResult)
        logits.append(result.logits.float().cpu())
    return torch.stack(logits)


@shows("triton")
def test_logits_are_the_references(
    family: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sliding_window": WINDOW} if FAMILY_DEFAULTS[cast(Family, family)].get("sliding_window") else {}
    make_checkpoint(tmp_path, cast(Family, family), **options)
    expected = logits_on(reference, tmp_path, device, monkeypatch)
    torch.testing.assert_close(
        logits_on(kernels.triton, tmp_path, device, monkeypatch), expected, atol=TOLERANCE, rtol=0
    )
