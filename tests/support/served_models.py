"""Models for lines and records, without an engine that runs."""

from __future__ import annotations

from typing import Any

from engine.text.tokenizer import Tokenizer
from settings import ModelSettings
from tests.support.fake_engine import FakeEngine
from worker.requests.served_model import ServedModel


def served_model(
    tokenizer: Tokenizer, *, max_model_len: int = 1 << 20, generates: bool = True, **settings: Any
) -> ServedModel:
    """A model called "m" of this tokenizer; `settings`: those of ModelSettings."""
    engine = FakeEngine(max_model_len=max_model_len)
    engine.tokenizer, engine.generates = tokenizer, generates
    return ServedModel(engine, ModelSettings(**{"name": "m", **settings}))
