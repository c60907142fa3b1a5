"""What compiled definitions let through: byte by byte, by the tokenizer's tokens, and for random JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer, TokenizerWrapper

from engine.engine import Engine
from engine.request import FinishReason, Request, RequestOutput
from engine.structured.compiler import ModelVocabulary
from engine.structured.grammar import Grammar
from engine.structured.trial import ByteVocabulary, compile_matcher, definition
from engine.text.tokenizer import Tokenizer
from tests.support.engines import load_engine, run_all
from tests.support.grammars import Schema, grammar_request, random_schema, schema_grammar
from tests.support.tiny_tokenizer import build_sentencepiece_tokenizer, make_tokenizer

INTEGER_A: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}}

EOS = 295

# Completed, of all: the others fill a string or a number up to max_tokens, as a model of random weights will.
MIN_COMPLETED = 0.7


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])


def _takes(tokenizer: LLTokenizer, grammar: Grammar, text: str) -> bool:
    """Whether `text` may be the whole text."""
    matcher, _ = compile_matcher(tokenizer, definition(grammar))
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"a":1}', True),
        ('{"a":"x"}', False),
        (r'{"\u0061":"x"}', False),
        (r'{"b":"\u0061"}', False),
        (r'{"b\n":"\"\\\n\r\t\b\f/é€😀"}', True),
    ],
)
def test_no_escape_leads_around_properties(tokenizer: LLTokenizer, text: str, is_taken: bool) -> None:
    assert _takes(tokenizer, schema_grammar(INTEGER_A), text) is is_taken


def test_a_choice_may_have_thousands_of_entries(tokenizer: LLTokenizer) -> None:
    choices = Grammar("choice", json.dumps([f"entry {i}" for i in range(2500)]))
    assert _takes(tokenizer, choices, "entry 2499")
    assert _takes(tokenizer, choices, "entry 249")
    assert not _takes(tokenizer, choices, "entry 2500")


def test_an_object_may_have_hundreds_of_optional_properties(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    assert _takes(tokenizer, schema_grammar(schema), '{"p3":"a","p599":"b"}')


@pytest.mark.parametrize("token", ["<|im_start|>", "<[1000-1005]>", "<[97,1000]>", "<[7-5]>"])
def test_a_token_named_otherwise_than_by_its_id_is_refused_saying_how(tokenizer: LLTokenizer, token: str) -> None:
    with pytest.raises(ValueError, match=r"accepted for a token: <\[id\]>, one id") as caught:
        compile_matcher(tokenizer, definition(Grammar("lark", f"start: {token}")))
    assert "are available" not in str(caught.value)
    assert token in str(caught.value), "the line it is on"


def _sentencepiece(path: Path, *, metaspace: bool = False) -> Tokenizer:
    build_sentencepiece_tokenizer(metaspace=metaspace).save(str(path / "tokenizer.json"))
    return Tokenizer.from_directory(path)


def _byte_level(path: Path) -> Tokenizer:
    make_tokenizer(path)
    return Tokenizer.from_directory(path)


@pytest.mark.parametrize("build", [_byte_level, _sentencepiece])
def test_tokens_have_the_bytes_that_the_library_reads_from_the_file(tmp_path: Path, build: type) -> None:
    tokenizer = build(tmp_path)
    eos = max(tokenizer.special_token_ids)
    vocabulary = ModelVocabulary(tokenizer, tokenizer.vocab_size, {eos})
    ours = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids)
    theirs = LLTokenizer((tmp_path / "tokenizer.json").read_text(), eos_token=[eos])
    # The library keeps byte FF, which no UTF-8 text has, for itself.
    reserved = {
        *tokenizer.special_token_ids,
        *(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff"),
    }
    plain = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in reserved]
    assert len(plain) > 250
    for token_id in plain:
        assert ours.decode_bytes([token_id]) == theirs.decode_bytes([token_id]) == tokenizer.token_bytes(token_id)
    assert ours.eos_tokens == [eos]
    assert all(ours.is_special_token(token_id) for token_id in tokenizer.special_token_ids)


def test_a_forced_text_is_tokenised_as_the_tokenizer_has_it(tmp_path: Path) -> None:
    tokenizer = _byte_level(tmp_path)
    vocabulary = ModelVocabulary(tokenizer, 320, {EOS})
    assert vocabulary(b"the you") == tokenizer.encode("the you")


@pytest.mark.parametrize("metaspace", [False, True])
def test_no_space_is_forced_where_the_tokenizer_begins_every_text_with_one(tmp_path: Path, metaspace: bool) -> None:
    tokenizer = _sentencepiece(tmp_path, metaspace=metaspace)
    vocabulary = ModelVocabulary(tokenizer, tokenizer.vocab_size, {max(tokenizer.special_token_ids)})
    assert b"".join(map(tokenizer.token_bytes, vocabulary(b"aeb the a"))) == b"aeb the a"


def test_a_special_token_spelled_out_is_written_with_plain_ones(tmp_path: Path) -> None:
    tokenizer = _byte_level(tmp_path)
    ids = ModelVocabulary(tokenizer, 320, {EOS})(b"a<|im_end|>b")
    assert EOS not in ids
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"a<|im_end|>b"


def test_a_model_without_an_end_of_sequence_has_one_behind_its_vocabulary(tmp_path: Path) -> None:
    vocabulary = ModelVocabulary(_byte_level(tmp_path), 320, ())
    assert vocabulary.eos_token_ids == [320]
    assert len(vocabulary.tokens) == 321


def _held(schemas: Sequence[Schema], max_tokens: int) -> list[Request]:
    """A request a schema, every third of them greedy; the prompts differ."""
    return [
        grammar_request(
            f"constrained {number}",
            schema_grammar(schema),
            (number % 250, number // 250, *range(20)),
            max_tokens=max_tokens,
            seed=number,
            temperature=0.0 if number % 3 == 0 else 1.0,
        )
        for number, schema in enumerate(schemas)
    ]


def _free(count: int) -> list[Request]:
    """Requests without a grammar: greedy ones and seeded ones, with penalties, bias and truncation among them."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_k": 20, "logit_bias": {7: 5.0}, "min_tokens": 5},
    ]
    return [
        grammar_request(f"free {n}", None, (n, *range(10, 25)), seed=n, **{"max_tokens": 40} | kinds[n % len(kinds)])
        for n in range(count)
    ]


def _with_logprobs(request: Request) -> Request:
    return replace(request, params=replace(request.params, logprobs=2))


def _interleaved(constrained: Sequence[Request], free: Sequence[Request]) -> list[Request]:
    places = [(number / len(group), request) for group in (constrained, free) for number, request in enumerate(group)]
    return [request for _, request in sorted(places, key=lambda pair: pair[0])]


def _assert_valid(schemas: Sequence[Schema], outputs: Mapping[str, RequestOutput]) -> None:
    completed = 0
    for number, schema in enumerate(schemas):
        output = outputs[f"constrained {number}"]
        assert output.error is None, (number, schema, output.error)
        (completion,) = output.completions
        if completion.finish_reason is FinishReason.STOP:
            completed += 1
            Draft202012Validator(schema).validate(json.loads(completion.text))
    assert completed >= MIN_COMPLETED * len(schemas), f"{completed} of {len(schemas)} completed"


def _assert_unnoticed(
    engine: Engine, schemas: Sequence[Schema], free: Sequence[Request], *, max_tokens: int = 300
) -> None:
    """Run schemas and free requests mixed, then the free ones alone: results valid, and equal to the byte."""
    mixed = run_all(engine, _interleaved(_held(schemas, max_tokens), free))
    _assert_valid(schemas, mixed)
    alone = run_all(engine, free)
    assert {name: output.completions for name, output in alone.items()} == {
        request.request_id: mixed[request.request_id].completions for request in free
    }


def test_completed_results_validate_and_lines_beside_them_are_as_without(tiny_model: Path) -> None:
    engine = load_engine(tiny_model)
    _assert_unnoticed(engine, [random_schema(seed) for seed in range(500, 528)], _free(16), max_tokens=120)
    engine.close()


@pytest.mark.structured
@pytest.mark.timeout(900)
def test_five_hundred_schemas(tiny_model: Path) -> None:
    engine = load_engine(tiny_model)
    _assert_unnoticed(engine, [random_schema(seed) for seed in range(500)], _free(200))
    engine.close()


@pytest.mark.structured
@pytest.mark.timeout(900)
def test_a_hundred_schemas_bit_for_bit_with_preemptions(tiny_model: Path) -> None:
    """Deterministic, in a pool too small for all: the free lines' log-probabilities have the same bits too."""
    engine = load_engine(tiny_model, {"engine.deterministic": "true", "engine.kv_cache.num_blocks": "120"})
    schemas = [random_schema(seed) for seed in range(1000, 1100)]
    _assert_unnoticed(engine, schemas, [_with_logprobs(request) for request in _free(50)])
    assert engine.stats().num_preemptions > 0
    engine.close()
