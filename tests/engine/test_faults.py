"""Steps and rows that fail, also while the next step is under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.embedding import EmbeddingState
from engine.engine import StepLoop
from engine.errors import EngineFatal, NonFiniteLogits
from engine.execution.forward import StepExecutor
from engine.execution.model_runner import ModelRunner
from engine.request import EmbeddingRequest, Request, RequestOutput
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings
from tests.support.devices import RecordingStream
from tests.support.engines import OpenEngine, greedy_request, load_engine, run_all, tokens_of

PROMPT = tuple(range(30))
ON: dict[str, object] = {"engine.async_scheduling": "on"}


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[OpenEngine]:
    engine = load_engine(tiny_model, ON)
    yield engine
    engine.check_integrity()
    assert engine.stats().num_free_blocks == 399


def _spoil(engine: OpenEngine, request_id: str, *, sequence: int = 0, block: int = 0) -> None:
    """Spoil one block of a sequence that runs, with a step under way."""
    assert engine._in_flight is not None
    states = [state for state in engine._scheduler.running if state.request.request_id == request_id]
    engine.spoil(states[sequence].sequence_id, block=block)


def _run_spoiled(engine: OpenEngine, *bad: Request, **spoiled: int) -> dict[str, RequestOutput]:
    """The outputs of requests, with a block of the first one spoiled; another request beside them must not change."""
    good = greedy_request("good", PROMPT[::-1], 20)
    expected = tokens_of(run_all(engine, [good])["good"])
    for request in (*bad, good):
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    _spoil(engine, bad[0].request_id, **spoiled)
    outputs = run_all(engine, [])
    assert tokens_of(outputs.pop("good")) == expected
    return outputs


def test_a_request_that_is_not_finite_fails_alone(engine: OpenEngine) -> None:
    outputs = _run_spoiled(engine, greedy_request("bad", PROMPT, 20))
    assert isinstance(outputs["bad"].error, NonFiniteLogits)
    again = run_all(engine, [greedy_request("bad", PROMPT, 20)])["bad"]
    assert again.num_cached_tokens == 0  # its blocks are not in the cache
    assert len(tokens_of(again)) == 20


def test_a_request_of_several_completions_fails_with_one_of_them(engine: OpenEngine) -> None:
    bad = Request("bad", PROMPT, SamplingParams(max_tokens=20, seed=7, n=3, ignore_eos=True))
    expected = run_all(engine, [bad])["bad"].completions
    outputs = _run_spoiled(engine, bad, sequence=1, block=-1)  # its own, after the prompt that all three share
    assert isinstance(outputs["bad"].error, NonFiniteLogits)
    assert outputs["bad"].completions == ()
    assert run_all(engine, [bad])["bad"].completions == expected


def test_the_first_of_equal_requests_fails_and_the_others_are_computed(engine: OpenEngine) -> None:
    equal = [greedy_request(name, PROMPT, 20) for name in ("first", "second", "third")]
    expected = tokens_of(run_all(engine, equal[:1])["first"])
    outputs = _run_spoiled(engine, *equal)
    assert isinstance(outputs["first"].error, NonFiniteLogits)
    assert tokens_of(outputs["second"]) == tokens_of(outputs["third"]) == expected


def test_an_embedding_fails_alone_with_its_next_chunk_under_way(tiny_model: Path) -> None:
    engine = load_engine(tiny_model, ON | {"engine.max_num_batched_tokens": "32", "engine.max_num_seqs": "8"})
    bad, good = EmbeddingRequest("bad", [list(range(120))]), EmbeddingRequest("good", [PROMPT[::-1]])
    [expected] = run_all(engine, [good])["good"].embeddings or ()
    engine.add_request(bad)
    for _ in range(2):
        assert engine.step() == []
    assert isinstance(engine._scheduler.running[0], EmbeddingState)
    _spoil(engine, "bad")
    outputs = run_all(engine, [good])
    assert isinstance(outputs["bad"].error, NonFiniteLogits)
    [found] = outputs["good"].embeddings or ()
    assert list(found) == pytest.approx(list(expected), abs=1e-5)  # other rows change the rounding
    assert run_all(engine, [bad])["bad"].error is None  # the spoiled blocks are not in the cache


@pytest.mark.parametrize("where", ["copy_back", "wait"])
def test_a_fault_of_the_device_is_fatal_wherever_it_shows(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    stream = RecordingStream()
    monkeypatch.setattr(stream, "copy_back", fail if where == "copy_back" else lambda _: fail)
    monkeypatch.setattr("engine.engine.make_device_stream", lambda _: stream)
    engine = load_engine(tiny_model, ON)
    engine.add_request(greedy_request("a", PROMPT, 4))
    with pytest.raises(EngineFatal, match="illegal memory access"):
        run_all(engine, [])
    assert "illegal memory access" in str(engine.model_interface.status())


def test_a_device_at_fault_is_not_asked_for_the_step_before(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(tiny_model, ON)
    engine.add_request(greedy_request("short", PROMPT, 2))
    engine.add_request(greedy_request("long", PROMPT[::-1], 20))
    for _ in range(2):
        assert engine.step() == []  # the second token of either is under way

    def fail(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def hang(*_: object) -> Any:
        pytest.fail("the device was asked")

    monkeypatch.setattr(engine, "_is_on_host", False)
    monkeypatch.setattr(StepExecutor, "execute", fail)
    monkeypatch.setattr(ModelRunner, "collect", hang)
    with pytest.raises(EngineFatal, match="illegal memory access"):
        engine.step()


def test_what_ended_is_handed_out_though_the_next_step_cannot_be_launched(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, short = load_engine(tiny_model, ON), greedy_request("short", PROMPT, 2)
    expected = tokens_of(run_all(engine, [short])["short"])
    engine.add_request(short)
    engine.add_request(greedy_request("long", PROMPT[::-1], 20))
    for _ in range(2):
        assert engine.step() == []  # the second token of either is under way

    def fail(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(StepExecutor, "execute", fail)
    (output,) = engine.step()
    assert (output.request_id, tokens_of(output)) == ("short", expected)
    assert engine.has_unfinished()
    for _ in range(2):
        with pytest.raises(EngineFatal, match="a step ran out of memory"):
            engine.step()
    with pytest.raises(EngineFatal, match="a step ran out of memory"):
        engine.add_request(greedy_request("late", PROMPT, 2))


class Harness(StepLoop):
    """Steps of which each may end requests, or fail."""

    def __init__(self) -> None:
        super().__init__(cast(EffectiveSettings, None), cast(Tokenizer, None))
        self.num_advances = 0
        self._ending: tuple[str, ...] = ()
        self._fails = False

    @property
    def _has_work(self) -> bool:
        return False

    def _advance(self) -> None:
        self.num_advances += 1
        self.end(*self._ending)
        if self._fails:
            raise EngineFatal("the device is gone")

    def end(self, *request_ids: str) -> None:
        for request_id in request_ids:
            output = RequestOutput(request_id, num_prompt_tokens=1, num_cached_tokens=0, completions=())
            self._finished.add(output, num_output_tokens=0, is_duplicate=False)

    def run(self, *ended: str, fails: bool = False) -> list[str]:
        self._ending, self._fails = ended, fails
        return [output.request_id for output in self.step()]


def test_each_step_hands_out_what_ended_in_it() -> None:
    harness = Harness()
    assert [harness.run("a", "b"), harness.run(), harness.run("c")] == [["a", "b"], [], ["c"]]
    assert not harness.has_unfinished()


def test_a_failure_is_raised_by_every_later_call_which_runs_nothing() -> None:
    harness = Harness()
    for _ in range(3):
        with pytest.raises(EngineFatal, match="the device is gone"):
            harness.run(fails=True)
    assert harness.num_advances == 1


def test_what_had_ended_is_handed_out_before_the_failure_is_raised() -> None:
    harness = Harness()
    assert harness.run("a", fails=True) == ["a"]
    assert harness.has_unfinished()
    with pytest.raises(EngineFatal, match="the device is gone"):
        harness.run("never")


def test_whoever_is_cancelled_after_a_failure_has_an_output_too() -> None:
    harness = Harness()
    assert harness.run("a", fails=True) == ["a"]
    harness.end("b")
    assert harness.run() == ["b"]
    with pytest.raises(EngineFatal, match="the device is gone"):
        harness.run()
