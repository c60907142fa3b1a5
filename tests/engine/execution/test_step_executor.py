"""Traces and layer profiles are off unless the settings select them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine.model_interface import DecodeItem
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.runners import make_runner


def _events(checkpoint: Path, **overrides: str) -> list[Any]:
    engine = load_engine(checkpoint, {f"engine.{key.replace('__', '.')}": v for key, v in overrides.items()})
    with capture_logs() as logs:
        run_all(engine, [greedy_request(str(i), [i] * 6, 10) for i in range(3)])
    return logs


def test_nothing_is_logged_by_default(moe_checkpoint: Path) -> None:
    assert _events(moe_checkpoint) == []


def test_a_trace_shows_each_step_without_its_tokens(moe_checkpoint: Path) -> None:
    first, second, *_ = _events(moe_checkpoint, trace_steps="true")
    assert (first["lens"], first["positions"], first["finals"]) == ([6, 6, 6], [0, 0, 0], [True] * 3)
    assert (second["lens"], second["positions"]) == ([1, 1, 1], [6, 6, 6])
    assert not any("token" in key for key in first)


def test_a_trace_tells_a_prompts_last_chunk_from_those_before_it(moe_checkpoint: Path) -> None:
    engine = load_engine(
        moe_checkpoint,
        {"engine.trace_steps": "true", "engine.max_num_batched_tokens": "16", "engine.max_num_seqs": "8"},
    )
    with capture_logs() as logs:
        run_all(engine, [greedy_request("a", list(range(40)), 2)])
    assert [(event["lens"], event["finals"]) for event in logs] == [
        ([16], [False]),
        ([16], [False]),
        ([8], [True]),
        ([1], [True]),
    ]


def test_a_trace_shows_the_chunks_of_a_prefill_through_the_runner(moe_checkpoint: Path) -> None:
    runner = make_runner(moe_checkpoint, trace_steps="true", max_num_batched_tokens="16", max_num_seqs="8")
    with capture_logs() as logs:
        runner.prefill("a", list(range(40)))
    assert [event["finals"] for event in logs] == [[False], [False], [True]]


def test_a_token_trace_shows_the_best_candidates(moe_checkpoint: Path) -> None:
    first = _events(moe_checkpoint, trace_tokens="true")[0]
    assert [len(row) for row in first["token_ids"]] == [5, 5, 5]


def test_a_token_trace_survives_nan(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.trace_tokens": "true"})
    engine._executor.model.final_norm.fill_(torch.nan)
    engine.add_request(greedy_request("a", [1, 2]))
    assert engine.step()[0].error is not None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every_steps": "1"}, [18, 3, 3, 3, 3, 3, 3, 3, 3, 3]),
        ({"every_steps": "1", "max_tokens": "3"}, [3] * 9),
        ({"every_steps": "1", "min_seqs": "4"}, []),
    ],
)
def test_a_profile_times_every_layer_of_the_selected_steps(
    moe_checkpoint: Path, settings: dict[str, str], expected: list[int]
) -> None:
    options = {f"profile__{key}": value for key, value in settings.items()}
    events = _events(moe_checkpoint, profile__layers="true", **options)
    assert [event["num_tokens"] for event in events] == expected
    for event in events:
        assert list(event["stages_ms"]) == ["-1", "0", "1", "2"]
        assert all(ms >= 0 for ms in event["stages_ms"].values())


def test_a_profile_runs_every_so_many_steps(moe_checkpoint: Path) -> None:
    events = _events(moe_checkpoint, profile__layers="true", profile__every_steps="4")
    assert [event["forward_pass"] % 4 for event in events] == [0, 0]


def test_decode_runs_together_from_the_threshold_on(moe_checkpoint: Path) -> None:
    runner = make_runner(moe_checkpoint, decode__batch_threshold="3")
    passes = []
    for count in (2, 3):
        names = [f"{count}-{i}" for i in range(count)]
        for name in names:
            runner.prefill(name, [1, 2, 3])
        before = runner.status().num_forward_passes
        runner.decode_batch([DecodeItem(name, 5, 3) for name in names])
        passes.append(runner.status().num_forward_passes - before)
    assert passes == [2, 1]
