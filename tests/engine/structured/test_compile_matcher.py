"""What definitions let through, tried byte by byte, and what is said of those that do not compile."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from engine.structured.grammar import Grammar
from engine.structured.trial import ByteVocabulary, compile_matcher, definition
from tests.support.grammars import schema_grammar

INTEGER_A: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}}


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
