"""Equal generation requests are computed once; each ends as if it had been alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import NonFiniteLogits
from engine.request import FinishReason, Request, RequestOutput
from engine.sampling_params import SamplingParams
from tests.support.engines import OpenEngine, load_engine, run_all, tokens_of

PROMPT = tuple(range(30))
MAX_TOKENS = 20
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load_engine(tiny_model)


@pytest.fixture(scope="module")
def without(tiny_model: Path) -> Engine:
    return load_engine(tiny_model, {"engine.deduplicate": "off"})


def _request(name: str, *, tenant: str = "", priority: int = 0, **params: Any) -> Request:
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | (params or GREEDY)
    return Request(name, PROMPT, SamplingParams(**options), priority, tenant)


def _steps(engine: Engine, count: int) -> dict[str, RequestOutput]:
    return {output.request_id: output for _ in range(count) for output in engine.step()}


def _work(engine: Engine) -> int:
    """Tokens generated so far."""
    return engine.stats().generated_tokens


@pytest.mark.parametrize("late_steps", [0, 1, 7])
@pytest.mark.parametrize(
    "params",
    [GREEDY, SEEDED, GREEDY | {"logprobs": 2}, SEEDED | {"n": 3}, SEEDED | {"stop": ("a", "e"), "max_tokens": 60}],
    ids=["greedy", "seeded", "logprobs", "three completions", "stop strings"],
)
def test_equal_requests_are_generated_once_and_each_ends_as_if_alone(
    engine: Engine, params: dict[str, Any], late_steps: int
) -> None:
    before = _work(engine)
    alone = run_all(engine, [_request("alone", **params)])["alone"]
    once = _work(engine) - before
    engine.add_request(_request("a", **params))
    early = _steps(engine, late_steps)
    outputs = early | run_all(engine, [_request(name, **params) for name in "bc"])
    if "a" in early:
        return  # it ended before the others came
    assert {name: outputs[name].completions for name in "abc"} == dict.fromkeys("abc", outputs["a"].completions)
    found = [replace(completion, logprobs=None) for completion in outputs["a"].completions]
    assert found == [replace(completion, logprobs=None) for completion in alone.completions]
    assert _work(engine) - before == 2 * once
    assert [outputs[name].num_cached_tokens for name in "bc"] == [30, 30]
    assert outputs["a"].num_cached_tokens < 30


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (_request("a", temperature=1.0), _request("b", temperature=1.0)),
        (_request("a", **SEEDED), _request("b", **SEEDED | {"seed": 8})),
        (_request("a", tenant="x"), _request("b", tenant="y")),
        (_request("a"), _request("b", temperature=0.0, logprobs=0)),
        (_request("a"), replace(_request("b"), prompt_token_ids=PROMPT[::-1])),
        (_request("a"), replace(_request("b"), prompt_token_ids=PROMPT[:-1])),
    ],
    ids=["no seed", "another seed", "another tenant", "other parameters", "another prompt", "a shorter prompt"],
)
def test_what_may_differ_is_computed_on_its_own(engine: Engine, one: Request, two: Request) -> None:
    before = engine.stats()
    run_all(engine, [one, two])
    assert engine.stats().generated_tokens - before.generated_tokens == 2 * MAX_TOKENS
    assert engine.stats().num_duplicates == before.num_duplicates


def test_the_switch_turns_it_off(without: Engine) -> None:
    outputs = run_all(without, [_request(name) for name in "abc"])
    assert _work(without) == 3 * MAX_TOKENS
    assert without.stats().num_duplicates == 0
    assert len({tuple(tokens_of(output)) for output in outputs.values()}) == 1


def test_a_request_that_ended_is_not_joined(engine: Engine) -> None:
    before = _work(engine)
    for name in "ab":
        run_all(engine, [_request(name)])
    assert _work(engine) - before == 2 * MAX_TOKENS


def test_the_figures_count_requests_each_and_work_once(engine: Engine) -> None:
    before = engine.stats()
    run_all(engine, [_request(name, **SEEDED) for name in "abcd"])
    after = engine.stats()
    assert after.generated_tokens - before.generated_tokens == MAX_TOKENS
    assert after.output_tokens - before.output_tokens == 4 * MAX_TOKENS
    assert after.prompt_tokens - before.prompt_tokens == 4 * 30
    assert after.cached_tokens - before.cached_tokens >= 3 * 30
    assert (
        after.num_finished_requests - before.num_finished_requests,
        after.num_duplicates - before.num_duplicates,
    ) == (4, 3)


@pytest.mark.parametrize("params", [GREEDY | {"logprobs": 1}, SEEDED | {"n": 2}], ids=["greedy", "two completions"])
@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_a_cancelled_request_gets_what_there_is_and_costs_others_nothing(
    engine: Engine, gone: str, params: dict[str, Any]
) -> None:
    alone = run_all(engine, [_request("alone", **params)])["alone"]
    before = _work(engine)
    for name in "abc":
        engine.add_request(_request(name, **params))
    _steps(engine, 8)
    assert engine.abort(gone)
    assert not engine.abort(gone)
    engine.add_request(_request(gone, temperature=1.0))  # its id may be used again at once
    (cancelled,) = [output for output in engine.step() if output.request_id == gone]
    outputs = _steps(engine, 2 * MAX_TOKENS)
    assert {completion.finish_reason for completion in cancelled.completions} == {FinishReason.CANCELLED}
    for completion, whole in zip(cancelled.completions, alone.completions, strict=True):
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) in (7, 8)
        assert whole.text.startswith(completion.text)
        assert (completion.logprobs is None) == (whole.logprobs is None)
    for name in {"a", "b", "c"} - {gone}:
        found = [completion.token_ids for completion in outputs[name].completions]
        assert found == [completion.token_ids for completion in alone.completions]
    assert _work(engine) - before == MAX_TOKENS * len(alone.completions) + MAX_TOKENS
    engine.check_integrity()


def test_all_of_them_cancelled_one_by_one_leave_nothing(engine: Engine) -> None:
    free = engine.stats().num_free_blocks
    for name in "abc":
        engine.add_request(_request(name))
    _steps(engine, 3)
    for name in "bac":
        assert engine.abort(name)
    assert {output.request_id for output in engine.step()} == {"a", "b", "c"}
    assert not engine.has_unfinished()
    assert engine.stats().num_free_blocks == free
    engine.check_integrity()


def test_a_failure_is_one_requests_own_and_the_others_are_tried_without_it(engine: OpenEngine) -> None:
    expected = tokens_of(run_all(engine, [_request("alone", **SEEDED)])["alone"])
    for name in "abc":
        engine.add_request(_request(name, **SEEDED))
    _steps(engine, 3)
    engine.spoil(engine._scheduler.running[0].sequence_id)
    outputs = run_all(engine, [])
    assert isinstance(outputs["a"].error, NonFiniteLogits)
    assert tokens_of(outputs["b"]) == tokens_of(outputs["c"]) == expected


def test_a_request_that_always_fails_fails_each_of_its_equals(engine: OpenEngine) -> None:
    before, bad = engine.stats().num_finished_requests, 250
    kept = engine.model.embed_tokens.tensor[bad].clone()
    engine.model.embed_tokens.tensor[bad] = torch.nan
    try:
        requests = [replace(_request(name), prompt_token_ids=(*PROMPT, bad)) for name in "abc"]
        outputs = run_all(engine, [*requests, _request("good")])
    finally:
        engine.model.embed_tokens.tensor[bad] = kept
    assert [type(outputs[name].error) for name in "abc"] == [NonFiniteLogits] * 3
    assert len(tokens_of(outputs["good"])) == MAX_TOKENS
    assert engine.stats().num_finished_requests - before == 4


def test_each_of_them_gets_the_checkpoints(tiny_model: Path) -> None:
    engine = load_engine(tiny_model, {"engine.checkpoint_tokens": "8"})
    for name in "abc":
        engine.add_request(_request(name, **SEEDED))
    _steps(engine, 7)
    assert engine.due_resume_states() == {}
    _steps(engine, 1)
    due = engine.due_resume_states()
    assert list(due) == ["a", "b", "c"]
    assert len({id(resume_state) for resume_state in due.values()}) == 1
    engine.abort("a")
    resume_state = engine.resume_state("b")
    assert resume_state is not None
    assert resume_state.num_tokens == 8
    expected = run_all(engine, [])["b"].completions
    before = _work(engine)
    resumed = [replace(_request(name, **SEEDED), resume=due[name]) for name in "abc"]
    outputs = run_all(engine, resumed)
    assert {output.completions for output in outputs.values()} == {expected}
    assert _work(engine) - before == MAX_TOKENS - 8
    assert {output.num_resumed_tokens for output in outputs.values()} == {8}


def test_a_checkpoint_is_set_aside_for_an_equal_request_that_runs(engine: Engine) -> None:
    engine.add_request(_request("a", **SEEDED))
    _steps(engine, 10)
    resume_state = engine.resume_state("a")
    engine.abort("a")
    engine.step()
    before = _work(engine)
    outputs = run_all(engine, [_request("b", **SEEDED), replace(_request("c", **SEEDED), resume=resume_state)])
    assert outputs["b"].completions == outputs["c"].completions
    assert [outputs[name].num_resumed_tokens for name in "bc"] == [0, 0]
    assert _work(engine) - before == MAX_TOKENS


def test_a_more_urgent_equal_makes_the_one_that_waits_more_urgent(tiny_model: Path) -> None:
    engine = load_engine(tiny_model, {"engine.max_num_seqs": "1"})
    engine.add_request(replace(_request("first"), prompt_token_ids=PROMPT[::-1]))
    engine.step()
    engine.add_request(replace(_request("second"), prompt_token_ids=PROMPT[1:]))
    engine.add_request(_request("late", priority=5))
    engine.add_request(_request("urgent", priority=-1))
    order: list[str] = []
    while engine.has_unfinished():
        order += [output.request_id for output in engine.step()]
        engine.check_integrity()
    assert order == ["first", "late", "urgent", "second"]


def test_closing_ends_all_of_them(tiny_model: Path) -> None:
    engine = load_engine(tiny_model)
    for name in "abc":
        engine.add_request(_request(name))
    _steps(engine, 2)
    engine.close()
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == ["a", "b", "c"]
    assert {output.completions[0].finish_reason for output in outputs} == {FinishReason.CANCELLED}
