"""Legal extremes: no step raises, nothing is lost, nothing that may not be chosen is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.errors import (
    CapabilityError,
    CheckpointError,
    EngineFatal,
    InvalidRequest,
    NonFiniteLogits,
    PromptTooLong,
)
from engine.execution.forward import StepExecutor
from engine.loading.derived_settings import derive_settings
from engine.request import Request
from engine.sampling_params import MAX_SEED, MAX_TOP_K, SamplingParams
from settings import load_settings
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import make_checkpoint

PROMPT = tuple(range(30))

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 6),
    min_tokens=st.integers(0, 1),
    temperature=st.sampled_from([0.0, 1e-5, 0.7, 1e4]),
    top_k=st.sampled_from([0, 1, 40, 5000, MAX_TOP_K]),
    top_p=st.sampled_from([1e-9, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.sampled_from([None, 0, -MAX_SEED - 1, MAX_SEED]),
    repetition_penalty=st.sampled_from([0.01, 1.0, 100.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, 319), st.sampled_from([-100.0, 100.0]), max_size=3),
    logprobs=st.sampled_from([None, 0, 20, 400]),
    stop_token_ids=st.lists(st.integers(0, 319), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    n=st.integers(1, 3),
)


@pytest.fixture(scope="module")
def engine(moe_checkpoint: Path) -> Engine:
    return load_engine(moe_checkpoint)


def test_nothing_but_allowed_tokens_is_generated_whatever_runs_beside_it(engine: Engine) -> None:
    allowed = (7, 50, 51)
    for temperature in (0.0, 1.0):
        params = [SamplingParams(max_tokens=6, temperature=temperature, allowed_token_ids=ids) for ids in (allowed, ())]
        outputs = run_all(engine, [Request(f"{i}", (i, *PROMPT), params[i % 2]) for i in range(6)])
        for index in range(6):
            assert (set(tokens_of(outputs[str(index)])) <= set(allowed)) == (index % 2 == 0)
    end = min(engine.eos_token_ids)
    ended = run_all(engine, [Request("e", PROMPT, SamplingParams(max_tokens=6, allowed_token_ids=(end,)))])["e"]
    assert [completion.token_ids for completion in ended.completions] == [(end,)]


@pytest.mark.parametrize(("ids", "said"), [((10**6,), "token id 1000000"), ((310, 311), "no token of the tokenizer")])
def test_allowed_tokens_that_are_none_are_refused(engine: Engine, ids: tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        engine.add_request(Request("a", PROMPT, SamplingParams(allowed_token_ids=ids)))
    assert caught.value.param == "allowed_token_ids"


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(params=st.lists(SAMPLING, min_size=1, max_size=4))
def test_no_legal_parameters_make_a_step_raise_or_choose_what_is_banned(
    engine: Engine, params: list[SamplingParams]
) -> None:
    outputs = run_all(engine, [Request(str(i), (i, *PROMPT), p) for i, p in enumerate(params)])
    unknown = set(engine.tokenizer.unknown_ids(engine.vocab_size))
    for index, p in enumerate(params):
        output = outputs[str(index)]
        assert output.error is None
        assert len(output.completions) == p.n
        for completion in output.completions:
            assert max(p.min_tokens, 1) <= len(completion.token_ids) <= (p.max_tokens or 0)
            assert not unknown & set(completion.token_ids)
            if p.min_tokens:
                assert completion.token_ids[0] not in p.stop_token_ids


def test_seeds_that_differ_in_their_sign_alone_draw_differently(engine: Engine) -> None:
    drawn = set()
    for seed in (-1, MAX_SEED, 0, -MAX_SEED - 1):
        request = Request("r", PROMPT, SamplingParams(max_tokens=16, seed=seed, ignore_eos=True))
        drawn.add(tuple(tokens_of(run_all(engine, [request])["r"])))
    assert len(drawn) == 4


def test_min_tokens_that_do_not_fit_are_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLong) as caught:
        engine.add_request(Request("r", PROMPT, SamplingParams(min_tokens=1000)))
    assert (caught.value.param, caught.value.need) == ("min_tokens", 1030)


def test_a_cancelled_completion_keeps_all_its_text(engine: Engine) -> None:
    params = SamplingParams(max_tokens=50, temperature=0.0, stop=("x" * 40,), logit_bias={88: 100.0})
    engine.add_request(Request("r", PROMPT, params))
    for _ in range(12):
        engine.step()
    engine.abort("r")
    (output,) = engine.step()
    (completion,) = output.completions
    assert completion.text == engine.tokenizer.decode(list(completion.token_ids))
    assert len(completion.token_ids) == 12


def test_preempted_requests_that_share_a_prefix_come_back_together(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.kv_cache.num_blocks": "33", "engine.max_num_seqs": "16"})
    shared = [i % 250 for i in range(192)]
    requests = [greedy_request(str(i), [*shared, i, i], 24) for i in range(40)]
    outputs = run_all(engine, requests)
    assert all(len(tokens_of(output)) == 24 for output in outputs.values())
    assert engine.stats().num_preemptions > 0
    # Serial would be 40 x 24 steps; 20 free blocks hold ten sequences beside the shared twelve: 4 rounds of 24.
    assert engine.stats().num_steps < 250


def test_a_prefix_with_nan_is_given_up_though_its_request_was_cancelled(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.max_num_batched_tokens": "32", "engine.max_num_seqs": "8"})
    prompt = [i % 250 for i in range(100)]
    engine.add_request(greedy_request("gone", prompt, 4))
    engine.step()
    engine.spoil("gone/1/0")
    engine.abort("gone")
    failed = run_all(engine, [greedy_request("second", prompt, 4)])["second"]
    assert failed.error is not None
    assert len(tokens_of(run_all(engine, [greedy_request("third", prompt, 4)])["third"])) == 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_overflows_fails_no_request_that_shares_its_prefix(moe_checkpoint: Path, bad: float) -> None:
    engine = load_engine(moe_checkpoint, {"engine.max_num_batched_tokens": "32", "engine.max_num_seqs": "8"})
    clean = list(range(20))
    engine.model.embed_tokens.tensor[250] = bad  # attention to its own values is not finite in any layer
    engine.add_request(greedy_request("bad", [*clean, 250, *range(100, 180)], 4))
    assert [type(output.error) for output in engine.step()] == [NonFiniteLogits]  # before its prompt is through
    assert len(tokens_of(run_all(engine, [greedy_request("good", [*clean, 3], 4)])["good"])) == 4


def test_a_step_that_fails_is_fatal_and_shown(moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(moe_checkpoint)
    engine.add_request(greedy_request("r", PROMPT, 4))

    def out_of_memory(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StepExecutor, "execute", out_of_memory)
    with pytest.raises(EngineFatal, match="a step failed: RuntimeError: out of memory"):
        engine.step()
    assert engine.model_interface.status().reason == "RuntimeError: out of memory"


def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused_at_load(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 320]}))
    with pytest.raises(CheckpointError, match="eos_token_id 320 is outside the vocabulary; accepted: 0 to 319"):
        load_engine(tmp_path)


def test_a_gpu_without_kernels_is_not_chosen_and_not_accepted(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    def derive(**overrides: Any) -> Any:
        values = {"model.path": str(moe_checkpoint), **{f"engine.{k}": v for k, v in overrides.items()}}
        return derive_settings(load_settings(values, environ={}, dotenv_path=Path("/dev/null")))

    assert derive().settings.engine.device == "cpu"
    with pytest.raises(CapabilityError, match=r"engine\.device=cuda.*compute capability 7\.5; accepted: 8\.0"):
        derive(device="cuda")
