"""The model interface on a small checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.model_interface import ErrorResult, ItemResult, LogitsResult, ModelRunner
from tests.support.engines import load_engine

PROMPT = list(range(40))


def make_runner(checkpoint: Path, **overrides: str) -> ModelRunner:
    """A runner with 399 usable blocks; overrides are engine settings, `__` for the dots in their names."""
    return load_engine(checkpoint, {f"engine.{k.replace('__', '.')}": v for k, v in overrides.items()}).runner


def logits_of(result: ItemResult | None) -> torch.Tensor:
    """The logits [V] of an item that must have them."""
    assert isinstance(result, LogitsResult)
    return result.logits


def error_of(result: ItemResult | None) -> Exception:
    """The error of an item that must have failed."""
    assert isinstance(result, ErrorResult)
    return result.error
