"""A request that is taken out of an engine half way."""

from __future__ import annotations

from engine.engine import Engine
from engine.request import Request, TokenCheckpoint


def interrupted(engine: Engine, request: Request, num_tokens: int) -> TokenCheckpoint:
    """The request's checkpoint once its sequences have `num_tokens` tokens each, or have ended with fewer."""
    engine.add_request(request)
    for _ in range(num_tokens):  # the prompt fits one step: a token a step
        assert engine.step() == []
    checkpoint = engine.checkpoint(request.request_id)
    assert checkpoint is not None
    assert engine.abort(request.request_id)
    engine.step()
    return checkpoint
