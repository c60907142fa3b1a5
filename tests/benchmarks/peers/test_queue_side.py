from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.peers.queue_side import queue_side
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import make_checkpoint

SETTINGS = ["engine.dtype=float32", "engine.kv_cache.num_blocks=100"]


@pytest.mark.slow
def test_a_trial_through_the_queue_gives_the_engines_tokens_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    prompts = [[number, 2, 3] for number in range(12)]
    with queue_side(model, SETTINGS) as side:
        answer = side.run(prompts, 4)
    assert 0 < answer["seconds"] < side.command_s[0]
    requests = [greedy_request(str(number), prompt, 4) for number, prompt in enumerate(prompts)]
    outputs = run_all(load_engine(model), requests)
    assert answer["outputs"] == [tokens_of(outputs[str(number)]) for number in range(12)]
