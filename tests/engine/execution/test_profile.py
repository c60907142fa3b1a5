"""Traces of forward passes and profiles of layers, written where the settings select them."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine.execution.profile import PassTrace
from engine.model_interface import DecodeItem
from tests.support.engines import greedy_request, load_engine, make_model_interface, run_all

STAGES = ["embedding", "layer 0", "layer 1", "logits"]
CPU = torch.device("cpu")


def trace_of(checkpoint: Path, profile: Mapping[str, str], max_passes: int = 100) -> list[dict[str, Any]]:
    """Events of a run of three prompts of 6 tokens and 5 tokens of output each: warm-up, prefill, four decodes."""
    file = io.BytesIO()
    trace = PassTrace(file, max_passes)
    engine = load_engine(checkpoint, {f"engine.profile.{key}": value for key, value in profile.items()}, trace)
    run_all(engine, [greedy_request(str(i), [i] * 6, 5) for i in range(3)])
    trace.close()
    events: list[dict[str, Any]] = json.loads(file.getvalue())["traceEvents"]
    return events


def ranges(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "user_annotation"]


def passes(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in ranges(events) if event["name"].startswith("forward pass")]


def test_a_pass_has_its_numbers_its_stages_in_order_and_their_operations(moe_checkpoint: Path) -> None:
    events = trace_of(moe_checkpoint, {"every_steps": "1", "min_seqs": "3", "max_tokens": "18"}, max_passes=1)
    whole, *stages = ranges(events)
    assert whole["name"] == "forward pass 1 (num_tokens=18, num_seqs=3)"
    assert [stage["name"] for stage in stages] == STAGES
    for before, after in itertools.pairwise(stages):
        assert before["ts"] + before["dur"] <= after["ts"]
    for stage in stages:
        assert whole["ts"] <= stage["ts"]
        assert stage["ts"] + stage["dur"] <= whole["ts"] + whole["dur"]
        inside = [e for e in events if e.get("cat") == "cpu_op" and 0 <= e["ts"] - stage["ts"] <= stage["dur"]]
        assert any(event["name"].startswith("aten::") for event in inside), stage["name"]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ({"every_steps": "1"}, [(0, 1, 1), (1, 18, 3), (2, 3, 3), (3, 3, 3), (4, 3, 3), (5, 3, 3)]),
        ({"every_steps": "2"}, [(0, 1, 1), (2, 3, 3), (4, 3, 3)]),
        ({"every_steps": "1", "max_tokens": "3", "min_seqs": "2"}, [(2, 3, 3), (3, 3, 3), (4, 3, 3), (5, 3, 3)]),
    ],
)
def test_only_the_selected_passes_are_in_the_file(
    moe_checkpoint: Path, profile: dict[str, str], expected: list[tuple[int, int, int]]
) -> None:
    events = trace_of(moe_checkpoint, profile)
    assert passes(events) == [f"forward pass {n} (num_tokens={t}, num_seqs={s})" for n, t, s in expected]
    assert [event["name"] for event in ranges(events) if not event["name"].startswith("forward")] == STAGES * len(
        expected
    )
    starts = [event["ts"] for event in ranges(events)]
    assert starts == sorted(starts)  # one base of time for all passes


def test_no_more_passes_than_asked_for_are_recorded(moe_checkpoint: Path) -> None:
    assert len(passes(trace_of(moe_checkpoint, {"every_steps": "1"}, max_passes=2))) == 2


def test_layers_are_timed_beside_the_trace_and_after_its_end(moe_checkpoint: Path) -> None:
    with capture_logs() as logs:
        events = trace_of(moe_checkpoint, {"layers": "true", "every_steps": "1"}, max_passes=5)
    timed = [event for event in logs if "stages_ms" in event]
    assert [event["forward_pass"] for event in timed] == list(range(6))
    gaps_ms = []
    for log, before, layer in zip(timed[1:5], ranges(events)[6::5], ranges(events)[7::5], strict=True):
        assert [before["name"], layer["name"]] == STAGES[:2]
        # Told inside the ranges: a layer's time begins before the end of the one before and ends before its own,
        # however long the process is kept waiting in between. 0.1 ms: the trace has another clock.
        assert 0 < log["stages_ms"]["0"] <= (layer["ts"] + layer["dur"] - before["ts"]) / 1e3 + 0.1
        gaps_ms.append(log["stages_ms"]["0"] - layer["dur"] / 1e3)
    assert min(gaps_ms) <= 1.0  # of a pass that nothing interrupted


def test_a_run_without_a_selected_pass_is_an_empty_trace(moe_checkpoint: Path) -> None:
    assert trace_of(moe_checkpoint, {"min_seqs": "99"}) == []


def test_a_pass_that_fails_is_left_out() -> None:
    file = io.BytesIO()
    trace = PassTrace(file, 2)
    with pytest.raises(MemoryError), trace.record("failed", CPU):
        raise MemoryError
    with trace.record("ran", CPU):
        torch.ones(1)
    trace.close()
    assert [event["name"] for event in ranges(json.loads(file.getvalue())["traceEvents"])] == ["ran"]


def test_a_full_disk_ends_the_trace_and_not_the_run(moe_checkpoint: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        trace = PassTrace(file, 100)
        engine = load_engine(moe_checkpoint, {"engine.profile.every_steps": "1"}, trace)
        outputs = run_all(engine, [greedy_request("a", [1] * 6, 5)])
        assert outputs["a"].error is None
        assert not trace.has_room
        with pytest.raises(OSError, match="No space left"):
            trace.close()


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
    interface = make_model_interface(moe_checkpoint, trace_steps="true", max_num_batched_tokens="16", max_num_seqs="8")
    with capture_logs() as logs:
        interface.prefill("a", list(range(40)))
    assert [event["finals"] for event in logs] == [[False], [False], [True]]


def test_a_token_trace_shows_the_best_candidates(moe_checkpoint: Path) -> None:
    first = _events(moe_checkpoint, trace_tokens="true")[0]
    assert [len(row) for row in first["token_ids"]] == [5, 5, 5]


def test_a_token_trace_survives_nan(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.trace_tokens": "true"})
    engine.model.final_norm.fill_(torch.nan)
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
    interface = make_model_interface(moe_checkpoint, decode__batch_threshold="3")
    passes = []
    for count in (2, 3):
        names = [f"{count}-{i}" for i in range(count)]
        for name in names:
            interface.prefill(name, [1, 2, 3])
        before = interface.status().num_forward_passes
        interface.decode_batch([DecodeItem(name, 5, 3) for name in names])
        passes.append(interface.status().num_forward_passes - before)
    assert passes == [2, 1]
