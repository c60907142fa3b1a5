"""Equal grammars are compiled once, and only so many are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import GrammarFailed
from engine.structured.grammar import Grammar
from engine.structured.grammar_compiler import GrammarCompiler
from engine.structured.grammar_matcher import GrammarMatcher
from engine.structured.token_masks import TokenMasks
from engine.text.tokenizer import Tokenizer
from settings import StructuredOutputSettings
from tests.support.tiny_tokenizer import make_tokenizer

EOS = 295


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tokenizer(tmp_path)
    return Tokenizer.from_directory(tmp_path)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    settings = StructuredOutputSettings(cached_grammars=2)
    compiler = GrammarCompiler(tokenizer, settings, vocab_size=320, eos_token_ids={EOS})
    yield compiler
    compiler.close()


def test_equal_grammars_are_compiled_once_whatever_they_are_called(compiler: GrammarCompiler) -> None:
    first = compiler.compile(Grammar("regex", "a+", "guided_regex"))
    assert compiler.compile(Grammar("regex", "a+", "structured_outputs")) is first
    assert compiler.compile(Grammar("lark", "a+")) is not first


def test_the_least_recently_used_is_forgotten(compiler: GrammarCompiler) -> None:
    one, two = Grammar("regex", "1"), Grammar("regex", "2")
    first, second = compiler.compile(one), compiler.compile(two)
    first.result(), second.result()
    assert compiler.compile(one) is first
    compiler.compile(Grammar("regex", "3")).result()
    assert compiler.compile(one) is first
    assert compiler.compile(two) is not second


def test_a_matcher_says_what_may_come_next(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Grammar("regex", "[ab]")).result().new_matcher({EOS})
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    assert _allowed(matcher) == sorted([a, b])
    was_over = matcher.is_over
    matcher.accept(a)
    assert (was_over, matcher.is_over) == (False, True)
    assert _allowed(matcher) == [EOS]


def test_several_masks_are_computed_together_and_one_that_fails_fails_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    matchers = [compiler.compile(Grammar("regex", text)).result().new_matcher({EOS}) for text in ("a", "b", "bb")]
    matchers[1].accept(a)
    masks = TokenMasks(2).allowed(matchers)
    assert isinstance(masks[1], GrammarFailed)
    assert [mask.nonzero()[0].tolist() for mask in masks if not isinstance(mask, GrammarFailed)] == [[a], [b]]


def _allowed(matcher: GrammarMatcher) -> list[int]:
    (mask,) = TokenMasks(1).allowed([matcher])
    assert not isinstance(mask, GrammarFailed)
    assert mask.shape == (320,)
    return [int(token_id) for token_id in mask.nonzero()[0]]
