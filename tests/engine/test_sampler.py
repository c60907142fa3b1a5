"""From logits to tokens, against transformers' processors in transformers' order."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer, TokenizerWrapper
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import GrammarFailed, InvalidRequest, NonFiniteLogits
from engine.sampler import SampledToken, Sampler, SamplingRow, plain_draws, row_arrays
from engine.sampling_params import MAX_TOP_K, SamplingParams
from engine.scheduling.sequence import TokenCounts
from engine.structured.grammar import Grammar
from engine.structured.matcher import CompiledGrammar
from engine.structured.trial import ByteVocabulary, compile_matcher, definition
from kernels.dispatch import operations

CPU = torch.device("cpu")
VOCAB = 97
PROMPT = (3, 5, 5, 8)
OUTPUT = (9, 9, 11)

CHAINS: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, []),
    ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    ({"temperature": 1.3, "top_k": 7}, [TemperatureLogitsWarper(1.3), TopKLogitsWarper(7)]),
    ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    (
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.4},
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            TemperatureLogitsWarper(1.5),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.05),
        ],
    ),
]


# Parameter -> a value that changes what a greedy row gets; the others leave that as it is, or come as another argument.
ASKED_OF_GREEDY_ROWS: dict[str, Any] = {
    "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {3: 1.0}, "logprobs": 0,
    "allowed_token_ids": (3,),
}  # fmt: skip
OF_DRAWS = {"temperature", "top_k", "top_p", "min_p", "seed"}
OF_TEXTS = {"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "grammar", "prompt_logprobs"}


def _row(seed: int = 0, banned: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    given = SamplingParams(**params)
    counts = TokenCounts(PROMPT)  # which the engine makes only where there are penalties
    for token_id in OUTPUT:
        counts.add(token_id)
    return SamplingRow(given, len(PROMPT) + len(OUTPUT), seed, counts if given.has_penalties else None, banned)


def _logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _sampler(unknown_ids: torch.Tensor | None = None) -> Sampler:
    return Sampler(operations(CPU), CPU, unknown_ids)


def _sample(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    results = _sampler().sample(logits.clone(), rows).answers.now()
    assert all(isinstance(result, SampledToken) for result in results)
    return [result.token_id for result in results if isinstance(result, SampledToken)]


def _frequencies(row: dict[str, Any], draws: int = 4000) -> torch.Tensor:
    """How often many seeds draw each token."""
    logits = _logits().expand(draws, VOCAB)
    tokens = _sample(logits, [_row(seed=seed, **row) for seed in range(draws)])
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB) / draws


# All of them at once: each alone takes as long, and tests/kernels compares the masks with transformers'.
@pytest.mark.parametrize(
    ("params", "chain"), [*(pytest.param(*each, marks=pytest.mark.slow) for each in CHAINS[:-1]), CHAINS[-1]]
)
def test_tokens_are_drawn_from_transformers_distribution(params: dict[str, Any], chain: list[Any]) -> None:
    expected = torch.softmax(LogitsProcessorList(chain)(torch.tensor([[*PROMPT, *OUTPUT]]), _logits()), dim=-1)[0]
    found = _frequencies(params)
    assert not found[expected == 0].any(), "a token was drawn that the warpers drop"
    # The distance of 4000 draws from their own distribution: 0.5 * sum sqrt(2 p (1 - p) / (pi n)) < 0.06 for 97 tokens.
    assert float((found - expected).abs().sum()) / 2 < 0.06


def test_greedy_takes_the_best_after_bias_and_penalties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 20], logits[0, 30] = 5.0, 4.5, 4.4
    assert _sample(logits, [_row(temperature=0.0)]) == [9]
    assert _sample(logits, [_row(temperature=0.0, repetition_penalty=1.2)]) == [20]
    assert _sample(logits, [_row(temperature=0.0, frequency_penalty=0.3)]) == [20]
    assert _sample(logits, [_row(temperature=0.0, presence_penalty=0.6)]) == [20]
    assert _sample(logits, [_row(temperature=0.0, presence_penalty=0.6, logit_bias={30: 0.2})]) == [30]


def test_nothing_but_allowed_tokens_is_chosen_row_by_row() -> None:
    logits = _logits(4, seed=5)
    best = logits.argmax(dim=-1).tolist()
    allowed = tuple(token_id for token_id in (8, 40, 41) if token_id not in best)
    wanted = [allowed[int(row[list(allowed)].argmax())] for row in logits]
    rows = [_row(temperature=0.0, allowed_token_ids=allowed), _row(temperature=0.0)] * 2
    assert _sample(logits, rows) == [wanted[0], best[1], wanted[2], best[3]]
    biased = _row(temperature=0.0, allowed_token_ids=allowed, logit_bias={allowed[0]: 100.0, best[0]: 100.0})
    assert _sample(logits[:1], [biased]) == [allowed[0]]
    drawn = _frequencies({"allowed_token_ids": allowed, "temperature": 1.5})
    expected = torch.softmax(_logits()[0][list(allowed)] / 1.5, dim=-1)
    assert float(drawn.sum()) == pytest.approx(float(drawn[list(allowed)].sum()))
    torch.testing.assert_close(drawn[list(allowed)], expected.to(drawn.dtype), atol=0.05, rtol=0)


def test_allowed_tokens_that_something_else_may_ban_are_refused_beside_it() -> None:
    beside: list[tuple[dict[str, Any], str]] = [
        ({"min_tokens": 1}, "min_tokens"),
        ({"grammar": Grammar("regex", "a")}, "allowed_token_ids"),
    ]
    for others, param in beside:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(allowed_token_ids=(3,), **others)
        assert caught.value.param == param


@pytest.mark.parametrize(("name", "value"), ASKED_OF_GREEDY_ROWS.items())
def test_a_greedy_row_that_asks_for_nothing_else_is_looked_at(name: str, value: Any) -> None:
    rows = [_row(temperature=0.0, **{name: value})]
    assert row_arrays(rows, VOCAB).keys() > {"draws"}
    assert plain_draws(rows) is None
    assert not rows[0].params.takes_best


def test_what_rows_drop_goes_with_their_draws_and_greedy_rows_have_none() -> None:
    truncated = _row(temperature=2.0, top_k=7, top_p=0.5, min_p=0.25)
    rows = [_row(temperature=0.0, top_k=3), None, _row(temperature=0.5, seed=9), truncated]
    draws, off = plain_draws(rows), MAX_TOP_K
    assert draws is not None
    temperatures, seeds, positions, top_k, top_p, min_p = (array.tolist() for array in draws)
    assert temperatures == [0.0, 0.0, 0.5, 2.0]
    assert (seeds, positions) == ([0, 0, 9, 0], [0, 0, 7, 7])
    assert (top_k, top_p, min_p) == ([off, off, off, 7], [1.0, 1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.25])
    without = plain_draws(rows[:3])
    assert without is not None
    assert [array.tolist() for array in without[3:]] == [[off] * 3, [1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_what_a_row_drops_is_the_same_whether_its_logits_are_edited_or_not(params: dict[str, Any]) -> None:
    logits = _logits(40, seed=8)
    rows = [_row(temperature=1.5, seed=seed, **params) for seed in range(40)]
    edited = [_row(temperature=1.5, seed=seed, logprobs=0, **params) for seed in range(40)]
    whole = [_row(temperature=1.5, seed=seed) for seed in range(40)]
    assert _sample(logits, rows) == _sample(logits, edited) != _sample(logits, whole)


def test_a_row_of_which_edits_leave_nothing_fails_alone() -> None:
    logits = _logits(2)
    logits[0, [3, 4]] = -torch.inf
    rows = [_row(temperature=0.0, allowed_token_ids=(3, 4)), _row(temperature=0.0, allowed_token_ids=(5,))]
    failed, chosen = _sampler().sample(logits, rows).answers.now()
    assert isinstance(failed, NonFiniteLogits)
    assert chosen == SampledToken(5, None)


def test_every_parameter_says_whether_greedy_rows_ask_for_it() -> None:
    assert {field.name for field in fields(SamplingParams)} == ASKED_OF_GREEDY_ROWS.keys() | OF_DRAWS | OF_TEXTS


def test_only_the_repetition_penalty_counts_the_prompt_too() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 20] = 5.0, 4.5
    assert _sample(logits, [_row(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)]) == [5]
    assert _sample(logits, [_row(temperature=0.0, repetition_penalty=1.2)]) == [20]


def test_a_banned_token_is_never_chosen_whatever_its_bias() -> None:
    logits = _logits()
    assert _sample(logits, [_row(temperature=0.0, banned=(4,), logit_bias={4: 100.0})]) != [4]


def test_a_row_depends_on_itself_alone() -> None:
    logits = _logits(5)
    rows = [
        _row(seed=1, temperature=0.0),
        _row(seed=2, temperature=0.7, top_p=0.9),
        _row(seed=3, repetition_penalty=1.3),
        _row(seed=4, top_k=3, logit_bias={1: 2.0}),
        _row(seed=5, min_p=0.1, temperature=2.0),
    ]
    together = _sample(logits, rows)
    assert [_sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    assert _sample(logits.flip(0), rows[::-1]) == together[::-1]


def test_a_temperature_near_zero_is_greedy_and_not_nan() -> None:
    assert _sample(_logits(), [_row(temperature=1e-5)]) == _sample(_logits(), [_row(temperature=0.0)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_and_the_others_do_not(value: float) -> None:
    logits = _logits(3)
    expected = _sample(logits, [_row(seed=i) for i in range(3)])
    logits[1, 50] = value
    results = _sampler().sample(logits, [_row(seed=i) for i in range(3)]).answers.now()
    assert isinstance(results[1], NonFiniteLogits)
    tokens = [result.token_id for result in results if isinstance(result, SampledToken)]
    assert tokens == [expected[0], expected[2]]


def test_logprobs_are_taken_before_anything_changes_the_logits() -> None:
    logits = _logits()
    row = _row(temperature=0.3, top_k=1, logprobs=2, logit_bias={60: 50.0}, repetition_penalty=1.5)
    (result,) = _sampler().sample(logits.clone(), [row]).answers.now()
    assert isinstance(result, SampledToken)
    assert result.logprobs is not None
    expected = torch.log_softmax(logits[0], dim=-1)
    assert result.token_id == 60
    assert result.logprobs.logprob == pytest.approx(float(expected[60]))
    assert [token for token, _ in result.logprobs.top] == expected.topk(2).indices.tolist()


def _grammar(regex: str) -> CompiledGrammar:
    """Over the 256 bytes."""
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])
    first_state, _ = compile_matcher(tokenizer, definition(Grammar("regex", regex)))
    return CompiledGrammar(first_state, vocab_size=256, mask_size=tokenizer.vocab_size)


def test_a_grammar_leaves_the_other_rows_bits_as_they_were() -> None:
    grammar = _grammar("[xy]")
    logits = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    held, alone = logits.clone(), logits.clone()
    row, sampler = _row(temperature=0.0, repetition_penalty=1.3), _sampler()
    results = sampler.sample(held, [row, row._replace(matcher=grammar.new_matcher(())), row]).answers.now()
    sampler.sample(alone, [row, row, row])
    assert torch.equal(held[[0, 2]], alone[[0, 2]])
    allowed = [ord("x"), ord("y")]
    assert torch.isfinite(held[1]).nonzero().flatten().tolist() == allowed
    assert torch.equal(held[1, allowed], alone[1, allowed])
    assert isinstance(results[1], SampledToken)
    assert results[1].token_id in allowed


def test_each_row_keeps_to_its_grammar_and_a_dead_end_fails_alone() -> None:
    logits = torch.randn(3, 256, generator=torch.Generator().manual_seed(6))
    matchers = [_grammar(regex).new_matcher(()) for regex in ("[ab]", "c", "[de]")]
    matchers[1].accept(ord("z"))
    rows = [_row()._replace(matcher=matcher) for matcher in matchers]
    first, failed, last = _sampler().sample(logits, rows).answers.now()
    assert isinstance(failed, GrammarFailed)
    assert isinstance(first, SampledToken)
    assert isinstance(last, SampledToken)
    assert chr(first.token_id) in "ab"
    assert chr(last.token_id) in "de"


def test_ids_without_a_token_are_never_chosen() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 90:] = 100.0
    sampler = _sampler(unknown_ids=torch.arange(90, VOCAB))
    for row in (_row(temperature=0.0, logit_bias={95: 100.0}), _row(seed=3)):
        (result,) = sampler.sample(logits.clone(), [row]).answers.now()
        assert isinstance(result, SampledToken)
        assert result.token_id < 90


def test_rows_with_log_probabilities_get_as_many_as_they_ask_for() -> None:
    logits = _logits(5)
    counts = (3, None, 0, 400, 3)
    rows = [_row(seed=i, logprobs=count) for i, count in enumerate(counts)]
    for logit, count, result in zip(logits, counts, _sampler().sample(logits.clone(), rows).answers.now(), strict=True):
        assert isinstance(result, SampledToken)
        if count is None:
            assert result.logprobs is None
            continue
        expected = torch.log_softmax(logit, dim=-1)
        assert result.logprobs is not None
        assert result.logprobs.token_id == result.token_id
        assert result.logprobs.logprob == pytest.approx(float(expected[result.token_id]))
        assert [token_id for token_id, _ in result.logprobs.top] == expected.topk(min(count, VOCAB)).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_drawn_is_only_looked_at(temperature: float) -> None:
    logits = _logits(4)
    logits[3, 7] = torch.nan
    row = _row(seed=9, temperature=temperature)
    first, second, good, bad = _sampler().sample(logits.clone(), [row, row, None, None]).answers.now()
    assert isinstance(first, SampledToken)
    assert isinstance(second, SampledToken)
    assert [first.token_id, second.token_id] == _sample(logits[:2], [row, row])
    assert good is None
    assert isinstance(bad, NonFiniteLogits)


def test_the_next_step_gets_a_valid_id_of_a_row_that_failed() -> None:
    logits = _logits(4)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 3, "top_p": 0.8, "min_p": 0.1}]
    for params in kinds:
        chosen = _sampler().sample(logits.clone(), [_row(seed=i, **params) for i in range(4)])
        *failed, good = chosen.answers.now()
        assert all(isinstance(answer, NonFiniteLogits) for answer in failed)
        assert isinstance(good, SampledToken)
        assert chosen.token_ids[3] == good.token_id
        assert ((chosen.token_ids >= 0) & (chosen.token_ids < VOCAB)).all()
