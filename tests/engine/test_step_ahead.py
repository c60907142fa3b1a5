"""What the host does with the device: the order, one copy back a step, no wait in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.execution.forward import StepExecutor
from engine.execution.model_runner import ModelRunner
from engine.models.decoder import DecoderModel
from engine.request import AnyRequest, EmbeddingRequest, FinishReason, Request, RequestOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.staging import ArrayStaging, StagingBuffer
from engine.structured.grammar import Grammar
from tests.support.devices import KernelOperations, NoHostReads, RecordingStream
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of

PROMPT = tuple(range(30))
ON: dict[str, object] = {"engine.async_scheduling": "on"}

EVERYTHING: list[AnyRequest] = [
    Request("greedy", PROMPT, SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, logprobs=2)),
    Request("drawn", PROMPT[3:], SamplingParams(seed=1, max_tokens=9, top_k=20, top_p=0.9, min_p=0.01, n=2)),
    Request("plain", PROMPT[4:], SamplingParams(seed=2, max_tokens=9, logit_bias={3: 1.0}, logprobs=4)),
    Request("penalised", PROMPT[5:], SamplingParams(seed=2, max_tokens=9, frequency_penalty=1.0, presence_penalty=0.5)),
    Request("held", PROMPT[6:], SamplingParams(seed=2, max_tokens=9, grammar=Grammar("regex", "[a-z]{9}"))),
    Request("scored", PROMPT[::-1], SamplingParams(seed=2, max_tokens=2, prompt_logprobs=3)),
    EmbeddingRequest("embedded", [PROMPT * 2, PROMPT[8:]]),
]


class Watched:
    """An engine that records its copies, schedules and launches."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, overrides: dict[str, object]) -> None:
        self.stream = RecordingStream()
        self._events = self.stream.events
        patch.setattr("engine.engine.make_device_stream", lambda _: self.stream)
        self.engine = load_engine(path, overrides)
        schedule, execute = Scheduler.schedule, StepExecutor.execute

        def noted_schedule(scheduler: Scheduler, **kwargs: bool) -> Any:
            batch = schedule(scheduler, **kwargs)
            self._events.append("nothing" if batch is None else "schedule")
            return batch

        def noted_execute(*args: Any) -> Any:
            self._events.append("launch")
            return execute(*args)

        patch.setattr(Scheduler, "schedule", noted_schedule)
        patch.setattr(StepExecutor, "execute", noted_execute)

    def step(self) -> str:
        """Run one step; what it did."""
        self._events.clear()
        self.outputs = self.engine.step()
        return ", ".join(self._events)


@pytest.fixture
def watched(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tiny_model, monkeypatch, ON)


def test_a_step_is_launched_before_the_one_ahead_is_waited_for(watched: Watched) -> None:
    watched.engine.add_request(greedy_request("a", PROMPT, 4))
    assert watched.step() == "schedule, launch, copy 0"
    assert watched.step() == "schedule, launch, copy 1, wait 0"
    assert watched.step() == "schedule, launch, copy 2, wait 1"
    assert watched.step() == "schedule, launch, copy 3, wait 2"
    assert watched.outputs == []
    assert watched.step() == "nothing, wait 3, nothing"  # max_tokens are on their way: no step for a fifth
    assert [len(tokens_of(output)) for output in watched.outputs] == [4]
    assert not watched.engine.has_unfinished()


def test_switched_off_each_step_is_waited_for_at_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tiny_model, monkeypatch, {})
    watched.engine.add_request(greedy_request("a", PROMPT, 2))
    assert watched.step() == "schedule, launch, copy 0, wait 0"
    assert watched.step() == "schedule, launch, copy 1, wait 1"
    assert not watched.engine.has_unfinished()


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.2}, {"grammar": Grammar("regex", "[a-z]{30}")}, {"prompt_logprobs": 1, "max_tokens": 30}],
    ids=["penalties", "grammar", "prompt scored in chunks"],
)
def test_a_sequence_that_needs_its_answer_is_waited_for_first(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    watched = Watched(tiny_model, monkeypatch, ON | {"engine.max_num_batched_tokens": "8", "engine.max_num_seqs": "8"})
    engine = watched.engine
    engine.add_request(Request("a", PROMPT, SamplingParams(temperature=0.0, **{"max_tokens": 20} | params)))
    while watched.step() != "schedule, launch, copy 0":
        pass
    if "prompt_logprobs" not in params:
        while engine._scheduler.running[0].num_pending_tokens == 0:  # up to the last chunk of its prompt
            watched.step()
    number = watched.stream.num_copies
    assert watched.step() == f"nothing, wait {number - 1}, schedule, launch, copy {number}"


def test_an_end_that_only_the_host_sees_costs_a_row_that_nobody_sees(watched: Watched) -> None:
    engine = watched.engine
    eos = next(iter(engine.eos_token_ids))
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=3, logit_bias={eos: 100.0})
    engine.add_request(Request("a", PROMPT, params))
    for _ in range(5):
        watched.step()
    (completion,) = watched.outputs[0].completions
    assert (len(completion.token_ids), completion.token_ids[-1]) == (4, eos)
    assert engine.stats().num_free_blocks == 399
    assert engine.has_unfinished()  # the step with its fifth row
    assert watched.step() == "nothing, wait 4, nothing"
    assert watched.outputs == []
    assert (engine.stats().generated_tokens, engine.stats().output_tokens) == (4, 4)
    engine.check_integrity()


@pytest.mark.parametrize("is_on", [True, False])
def test_launching_never_waits_and_each_step_is_copied_back_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    options: dict[str, object] = {"engine.max_num_batched_tokens": "40", "engine.max_num_seqs": "40"}
    expected = run_all(load_engine(tiny_model, options), EVERYTHING)
    watched = Watched(tiny_model, monkeypatch, options | (ON if is_on else {}))
    engine, guard = watched.engine, NoHostReads()
    launch = ModelRunner.launch

    def guarded(*args: Any) -> Any:
        with guard:
            return launch(*args)

    monkeypatch.setattr(ModelRunner, "launch", guarded)
    monkeypatch.setattr(engine._sampler, "_ops", KernelOperations(engine._sampler._ops, guard))
    for name in ("forward", "logits"):
        monkeypatch.setattr(DecoderModel, name, guard.kernel(getattr(DecoderModel, name)))
    monkeypatch.setattr(ArrayStaging, "send", guard.kernel(ArrayStaging.send))
    for user in (engine._sampler, engine._runner._scorer):  # the way of a GPU
        monkeypatch.setattr(user._staging, "_buffers", StagingBuffer.pair(torch.device("cpu")))
    found = run_all(engine, EVERYTHING)
    assert {name: _read(output) for name, output in found.items()} == {n: _read(o) for n, o in expected.items()}
    assert watched.stream.num_copies == engine.stats().num_steps
    assert guard.num_calls > 5 * engine.stats().num_steps


def _read(output: RequestOutput) -> Any:
    vectors = [[round(value, 4) for value in vector] for vector in output.embeddings or ()]
    scores = [None if entry is None else entry.token_id for entry in output.prompt_logprobs or ()]
    texts = [(c.token_ids, c.text, c.finish_reason) for c in output.completions]
    chosen = [[(entry.token_id, *dict(entry.top)) for entry in c.logprobs or ()] for c in output.completions]
    return output.error, output.num_prompt_tokens, texts, chosen, scores, vectors


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[0].item(),
        lambda tensor: bool(tensor.any()),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor[[0, 1]],
        lambda tensor: torch.tensor([1.0]),
        lambda tensor: torch.where(tensor > 0, tensor, 1.0),
        lambda tensor: tensor.cpu(),
    ],
)
def test_the_watch_notices_a_wait(read: Any) -> None:
    with pytest.raises(AssertionError, match="the host waits"), NoHostReads():
        read(torch.ones(3))


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = load_engine(tiny_model, ON)
    yield engine
    engine.check_integrity()
    assert engine.stats().num_free_blocks == 399


def _rest(engine: Engine) -> dict[str, RequestOutput]:
    return run_all(engine, [])


def test_cancelling_frees_blocks_at_once_and_drops_the_token_under_way(engine: Engine) -> None:
    whole = tokens_of(run_all(engine, [greedy_request("whole", PROMPT, 20)])["whole"])
    engine.add_request(greedy_request("gone", PROMPT, 20))
    for _ in range(10):
        engine.step()
    assert engine.abort("gone")
    assert engine.stats().num_free_blocks == 399
    engine.add_request(greedy_request("gone", PROMPT, 20))  # its id may be used again at once
    outputs = {len(o.completions[0].token_ids): o for o in engine.step()} | {20: _rest(engine)["gone"]}
    (cancelled,) = outputs[9].completions
    assert (cancelled.finish_reason, list(cancelled.token_ids)) == (FinishReason.CANCELLED, whole[:9])
    assert tokens_of(outputs[20]) == whole


def test_closing_ends_everyone_with_a_step_under_way(engine: Engine) -> None:
    for name in "abc":
        engine.add_request(greedy_request(name, PROMPT, 20))
    for _ in range(3):
        engine.step()
    engine.close()
    assert sorted(output.request_id for output in engine.step()) == ["a", "b", "c"]
    assert not engine.has_unfinished()


def test_a_checkpoint_holds_what_has_been_collected(engine: Engine) -> None:
    engine.add_request(greedy_request("a", PROMPT, 20))
    for _ in range(4):
        engine.step()
    resume_state = engine.resume_state("a")
    assert resume_state is not None
    assert resume_state.num_tokens == 3
    assert len(tokens_of(_rest(engine)["a"])) == 20


def test_it_is_off_on_a_cpu_unless_asked_for(tiny_model: Path) -> None:
    assert load_engine(tiny_model).settings.engine.async_scheduling is False
    assert load_engine(tiny_model, ON | {"engine.deterministic": "on"}).settings.engine.async_scheduling is True
