"""Requests through the whole engine on a small model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import CapabilityError, CheckpointError, InvalidRequest, NonFiniteLogits, PromptTooLong
from engine.request import FinishReason, Request, RequestOutput
from engine.sampling_params import SamplingParams
from settings import load_settings
from tests.support.engines import greedy_request, load_decoder_engine, load_engine, run_all, tokens_of
from tests.support.tiny_tokenizer import PIECES, build_sentencepiece_tokenizer

PROMPT = tuple(range(30))


def _request(name: str, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    options: Mapping[str, Any] = {"max_tokens": 24, "ignore_eos": True} | params
    return Request(name, prompt, SamplingParams(**options))


def _one(engine: Engine, **params: Any) -> RequestOutput:
    return run_all(engine, [_request("only", **params)])["only"]


@pytest.fixture(scope="module")
def engine(moe_checkpoint: Path) -> Engine:
    return load_engine(moe_checkpoint)


def test_a_request_gets_exactly_max_tokens_and_says_length(engine: Engine) -> None:
    (completion,) = _one(engine, temperature=0.0).completions
    assert (len(completion.token_ids), completion.finish_reason) == (24, FinishReason.LENGTH)


def test_without_max_tokens_a_request_fills_the_context_to_the_last_token(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.max_model_len": "50"})
    (completion,) = _one(engine, max_tokens=None).completions
    assert (len(completion.token_ids), completion.finish_reason) == (20, FinishReason.LENGTH)


def test_a_seeded_request_gives_the_same_tokens_in_any_batch(engine: Engine) -> None:
    seeded: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    alone = tokens_of(_one(engine, **seeded))
    others = [_request(str(i), (i, *PROMPT[: i % 7]), temperature=1.0, seed=i) for i in range(20)]
    assert tokens_of(run_all(engine, [*others, _request("only", **seeded)])["only"]) == alone
    assert tokens_of(_one(engine, temperature=0.9, top_p=0.95, seed=12)) != alone


def test_a_seeded_request_gives_the_same_tokens_after_preemption(moe_checkpoint: Path, engine: Engine) -> None:
    requests = [_request(str(i), (i, *PROMPT), temperature=0.8, seed=i) for i in range(12)]
    expected = {name: tokens_of(output) for name, output in run_all(engine, requests).items()}
    tight = load_engine(moe_checkpoint, {"engine.kv_cache.num_blocks": "14"})
    found = {name: tokens_of(output) for name, output in run_all(tight, requests).items()}
    assert tight.stats().num_preemptions > 0
    assert found == expected


def test_unseeded_requests_differ_but_not_under_a_seeded_engine(moe_checkpoint: Path, engine: Engine) -> None:
    assert tokens_of(_one(engine)) != tokens_of(_one(engine))
    runs = [tokens_of(_one(load_engine(moe_checkpoint, {"engine.seed": "3"}))) for _ in range(2)]
    assert runs[0] == runs[1]


def test_n_completions_share_the_prompt_and_differ_in_their_draws(engine: Engine) -> None:
    output = _one(engine, n=3, seed=5, temperature=1.0)
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert len({completion.token_ids for completion in output.completions}) == 3
    assert output.completions[0].token_ids == tuple(tokens_of(_one(engine, seed=5, temperature=1.0)))


def test_an_end_of_sequence_id_ends_the_text_and_is_not_in_it(engine: Engine) -> None:
    eos = next(iter(engine.eos_token_ids))
    output = _one(engine, temperature=0.0, ignore_eos=False, logit_bias={eos: 100.0})
    (completion,) = output.completions
    assert (completion.token_ids, completion.text) == ((eos,), "")
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, None)


def test_min_tokens_bans_every_way_to_end(engine: Engine) -> None:
    eos = next(iter(engine.eos_token_ids))
    output = _one(engine, temperature=0.0, ignore_eos=False, logit_bias={eos: 100.0}, min_tokens=5)
    (completion,) = output.completions
    assert len(completion.token_ids) == 6
    assert completion.token_ids[-1] == eos
    assert not set(completion.token_ids[:-1]) & engine.eos_token_ids


def test_a_stop_token_ends_and_is_named(engine: Engine) -> None:
    plain = tokens_of(_one(engine, temperature=0.0))
    stop = plain[3]
    (completion,) = _one(engine, temperature=0.0, stop_token_ids=(stop,)).completions
    assert completion.token_ids == tuple(plain[: plain.index(stop) + 1])
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)


def test_a_stop_string_across_tokens_ends_and_is_not_in_the_text(engine: Engine) -> None:
    (plain,) = _one(engine, prompt=tuple(engine.tokenizer.encode("the you are")), temperature=0.0).completions
    stop = plain.text[4:7]
    first = plain.text.index(stop)
    (completion,) = _one(
        engine, prompt=tuple(engine.tokenizer.encode("the you are")), temperature=0.0, stop=(stop, "never there")
    ).completions
    assert completion.text == plain.text[:first]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)


def test_the_text_is_the_decoded_tokens(engine: Engine) -> None:
    (completion,) = _one(engine, temperature=0.7, seed=1).completions
    assert completion.text == engine.tokenizer.decode(list(completion.token_ids))


def test_a_text_that_goes_on_keeps_the_space_it_begins_with(moe_checkpoint: Path, tmp_path: Path) -> None:
    copytree(moe_checkpoint, tmp_path, dirs_exist_ok=True)
    build_sentencepiece_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    engine = load_engine(tmp_path)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "logit_bias": {1 + PIECES.index("▁the"): 100.0}}
    requests = [_request(str(stop), stop=stop, **options) for stop in ((), (" the",))]
    going_on = [replace(request, request_id=f"{request.request_id} goes on", goes_on=True) for request in requests]

    found = run_all(engine, [*requests, *going_on])

    texts = [found[request.request_id].completions[0].text for request in (*requests, *going_on)]
    assert texts == ["the the the", "the", " the the the", ""]


def test_a_bias_forces_and_forbids(engine: Engine) -> None:
    assert tokens_of(_one(engine, temperature=0.0, logit_bias={42: 100.0})) == [42] * 24


def test_a_frequency_penalty_ends_a_loop(engine: Engine) -> None:
    looped = tokens_of(_one(engine, temperature=0.0, logit_bias={42: 9.0, 43: 8.0}))
    varied = tokens_of(_one(engine, temperature=0.0, logit_bias={42: 9.0, 43: 8.0}, frequency_penalty=2.0))
    assert varied.count(42) < looped.count(42)


def test_logprobs_are_those_of_the_raw_logits(engine: Engine) -> None:
    (completion,) = _one(engine, temperature=0.0, logprobs=3, max_tokens=4, logit_bias={42: 100.0}).completions
    assert completion.logprobs is not None
    logits = engine.model_interface.prefill("raw", PROMPT)
    expected = torch.log_softmax(logits.logits, dim=-1)  # type: ignore[union-attr]  # a prompt this short fits
    engine.model_interface.release("raw")
    first = completion.logprobs[0]
    assert first.token_id == 42
    assert first.logprob == pytest.approx(float(expected[42]), abs=1e-4)
    assert [token for token, _ in first.top] == expected.topk(3).indices.tolist()
    assert len(completion.logprobs) == 4


def test_greedy_ten_times_is_greedy_once(engine: Engine) -> None:
    assert len({tuple(tokens_of(_one(engine, temperature=0.0))) for _ in range(10)}) == 1


def test_cancelling_frees_the_blocks_at_once_and_keeps_what_was_generated(engine: Engine) -> None:
    engine.add_request(greedy_request("gone", PROMPT, 500))
    engine.add_request(greedy_request("stays", PROMPT[::-1], 20))
    for _ in range(10):
        engine.step()
    held = engine.stats().num_free_blocks
    assert engine.abort("gone")
    assert engine.stats().num_free_blocks > held
    assert not engine.abort("gone")
    outputs = {output.request_id: output for output in run_rest(engine)}
    (completion,) = outputs["gone"].completions
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.CANCELLED, 10)
    assert len(tokens_of(outputs["stays"])) == 20


def run_rest(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


def test_a_waiting_request_can_be_cancelled(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.max_num_seqs": "1"})
    engine.add_request(greedy_request("a", PROMPT, 30))
    engine.add_request(greedy_request("b", PROMPT[::-1], 30))
    engine.step()
    assert engine.abort("b")
    assert [output.request_id for output in engine.step()] == ["b"]


def test_closing_ends_everyone_with_an_output(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    for name in "abc":
        engine.add_request(_request(name))
    engine.step()
    engine.close()
    assert sorted(output.request_id for output in engine.step()) == ["a", "b", "c"]
    assert engine.stats().num_free_blocks == 399


def test_a_request_with_nan_fails_alone(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    engine.add_request(greedy_request("bad", PROMPT, 20))
    engine.add_request(greedy_request("good", PROMPT[::-1], 20))
    engine.step()
    engine.spoil("bad/1/0")
    outputs = {output.request_id: output for output in run_rest(engine)}
    assert isinstance(outputs["bad"].error, NonFiniteLogits)
    assert outputs["bad"].completions == ()
    assert len(tokens_of(outputs["good"])) == 20
    engine.check_integrity()
    assert len(tokens_of(run_all(engine, [greedy_request("bad", PROMPT, 20)])["bad"])) == 20


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (_request("__millrace_x"), "request_id", "__millrace"),
        (_request("r", ()), "prompt", "empty"),
        (_request("r", (1, 320)), "prompt", "token id 320; accepted: 0 to 319"),
        (_request("r", logit_bias={999: 1.0}), "logit_bias", "token id 999"),
        (_request("r", stop_token_ids=(-4,)), "stop_token_ids", "token id -4"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_name(
    engine: Engine, request_: Request, param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.add_request(request_)
    assert caught.value.param == param
    assert not engine.has_unfinished()


def test_a_request_that_never_fits_is_refused_with_need_and_capacity(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.kv_cache.num_blocks": "5"})
    with pytest.raises(PromptTooLong) as caught:
        engine.add_request(greedy_request("r", PROMPT, 35))
    assert (caught.value.need, caught.value.capacity) == (65, 64)
    with pytest.raises(PromptTooLong) as prompt_alone:
        engine.add_request(greedy_request("r", [1] * 64, 1))
    assert prompt_alone.value.param == "prompt"
    assert len(tokens_of(run_all(engine, [greedy_request("r", PROMPT, 34)])["r"])) == 34


def test_a_taken_id_is_refused(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    engine.add_request(_request("a"))
    with pytest.raises(InvalidRequest, match="'a' is taken"):
        engine.add_request(_request("a"))


def test_n_plus_one_requests_over_a_pool_that_holds_n_all_finish(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.kv_cache.num_blocks": str(1 + 4 * 4)})
    requests = [greedy_request(str(i), (i, *PROMPT[1:]), 34) for i in range(5)]
    outputs = run_all(engine, requests)
    assert all(len(tokens_of(output)) == 34 for output in outputs.values())


def test_the_same_load_costs_the_same_steps_each_of_three_times(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.prefix_cache.enabled": "false"})
    steps = []
    for _ in range(3):
        before = engine.stats().num_steps
        run_all(engine, [greedy_request(str(i), (i, *PROMPT), 16) for i in range(30)])
        steps.append(engine.stats().num_steps - before)
    assert len(set(steps)) == 1


def _load(path: Path | None, **overrides: str) -> Engine:
    values: dict[str, object] = {f"engine.{key.replace('__', '.')}": value for key, value in overrides.items()}
    if path is not None:
        values["model.path"] = str(path)
    return load_decoder_engine(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))


def test_what_nobody_set_is_derived_and_shown_as_derived(moe_checkpoint: Path) -> None:
    engine = _load(moe_checkpoint, device="cpu", max_num_seqs="2")
    shown = engine.effective.as_json()
    assert shown["engine.kv_cache.num_blocks"] == {"value": 2 * 64 + 1, "source": "derived"}
    assert shown["engine.dtype"] == {"value": "float32", "source": "derived"}
    assert shown["engine.max_num_seqs"] == {"value": 2, "source": "command line"}
    assert engine.settings.model.name == "tiny-moe"
    assert engine.stats().num_blocks == 129


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"device": "cuda"}, r"engine\.device=cuda.*accepted: cpu"),
        ({"device": "cpu", "dtype": "float16"}, r"engine\.dtype=float16.*accepted: auto, float32, bfloat16"),
        ({"device": "cpu", "cuda_graphs__enabled": "true"}, r"engine\.cuda_graphs\.enabled=true"),
        ({"max_model_len": "4096"}, r"engine\.max_model_len=4096: the model was made for 1024 tokens"),
        ({"max_model_len": "65", "kv_cache__num_blocks": "5"}, r"the KV pool of 5 blocks holds 64 tokens"),
    ],
)
def test_a_setting_this_machine_cannot_honour_stops_the_start(
    moe_checkpoint: Path, overrides: dict[str, str], message: str
) -> None:
    if overrides.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(CapabilityError, match=message):
        _load(moe_checkpoint, **overrides)


def test_without_a_model_the_setting_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"set model\.path"):
        _load(None)
