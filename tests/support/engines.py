"""Engines on small checkpoints, and running requests on them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.engine import Engine
from engine.execution.profile import PassTrace
from engine.loading.load import load_engine as load_any_engine
from engine.request import AnyRequest, Request, RequestOutput
from engine.sampling_params import SamplingParams
from settings import EffectiveSettings, load_settings

MAX_STEPS = 20_000


def load_engine(
    path: Path, overrides: Mapping[str, object] | None = None, pass_trace: PassTrace | None = None
) -> Engine:
    """An engine in float32 on one thread with 400 blocks of 16 tokens, whatever this machine's environment says."""
    values: dict[str, object] = {
        "model.path": str(path),
        "engine.device": "cpu",
        "engine.dtype": "float32",
        "engine.num_threads": "1",
        "engine.kv_cache.num_blocks": "400",
    }
    effective = load_settings(values | dict(overrides or {}), environ={}, dotenv_path=Path(os.devnull))
    return load_decoder_engine(effective, pass_trace)


def load_decoder_engine(effective: EffectiveSettings, pass_trace: PassTrace | None = None) -> Engine:
    """The engine of a model that is a decoder."""
    engine = load_any_engine(effective, pass_trace)
    assert isinstance(engine, Engine)
    return engine


def greedy_request(request_id: str, prompt: Sequence[int], max_tokens: int = 64) -> Request:
    """Greedy, and only max_tokens ends it."""
    return Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def run_all(engine: Engine, requests: Sequence[AnyRequest]) -> dict[str, RequestOutput]:
    """Run requests to their ends, one output each; the pool must be whole afterwards."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        steps += 1
        assert steps < MAX_STEPS
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert outputs.keys() >= {request.request_id for request in requests}
    return outputs


def tokens_of(output: RequestOutput) -> list[int]:
    """Tokens of a request's only completion."""
    assert output.error is None, output.error
    (completion,) = output.completions
    return list(completion.token_ids)
