"""Equal grammars are compiled once, only so many are kept, and some schemas are refused before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable, GrammarFailed
from engine.structured.compiler import GrammarCompiler
from engine.structured.grammar import Grammar, check_json_schema
from engine.structured.matcher import GrammarMatcher, TokenMasks
from engine.text.tokenizer import Tokenizer
from settings import StructuredOutputSettings
from tests.support.grammars import GatedTrials
from tests.support.tiny_tokenizer import make_tokenizer

EOS = 295
# A thread's stack is 2 MiB by default, as glibc has it under "ulimit -s unlimited"; the chain passes the trial's 4 MiB.
DEEP_COMPILE = """
import json, sys, threading
from pathlib import Path
from engine.structured.grammar import Grammar
from engine.structured.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from settings import StructuredOutputSettings

defs = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1200)} | {"a1200": {"type": "integer"}}
threading.stack_size(2 << 20)
tokenizer = Tokenizer.from_directory(Path(sys.argv[1]))
compiler = GrammarCompiler(tokenizer, StructuredOutputSettings(), vocab_size=320, eos_token_ids={295})
compiler.compile(Grammar("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": defs}))).result()
assert threading.stack_size() == 2 << 20
compiler.close()
"""

MANY = {"type": "object", "minProperties": 3}


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


def test_masks_are_computed_together_and_one_that_fails_fails_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    matchers = [compiler.compile(Grammar("regex", text)).result().new_matcher({EOS}) for text in ("a", "b", "bb")]
    matchers[1].accept(a)
    masks, faults = TokenMasks(2).forbidden(matchers)
    assert isinstance(faults[1], GrammarFailed)
    assert [(~masks[row]).nonzero()[0].tolist() for row in (0, 2)] == [[a], [b]]
    assert not masks[1].any()


def test_a_grammar_that_passes_its_trial_has_the_stack_it_needs(compiler: GrammarCompiler, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEEP_COMPILE, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_grammar_that_could_not_be_tried_is_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    grammar = Grammar("regex", "a")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", popen)
        assert isinstance(compiler.compile(grammar).exception(), EngineUnavailable)
    assert compiler.compile(grammar).exception() is None


def test_after_a_close_what_waited_is_compiled_only_when_asked_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = GatedTrials(monkeypatch)
    begun, waiting = compiler.compile(Grammar("regex", "1")), compiler.compile(Grammar("regex", "2"))
    trials.wait_begun()
    compiler.close()
    trials.go_on()
    assert isinstance(begun.exception(), EngineUnavailable)
    assert waiting.cancelled()
    assert trials.tried == ["1"]
    assert [compiler.compile(Grammar("regex", text)).exception() for text in "12"] == [None, None]


def _allowed(matcher: GrammarMatcher) -> list[int]:
    masks, faults = TokenMasks(1).forbidden([matcher])
    assert (masks.shape, faults) == ((1, 320), [None])
    return [int(token_id) for token_id in (~masks[0]).nonzero()[0]]


@pytest.mark.parametrize("name", ["const", "enum", "default", "examples", "required"])
@pytest.mark.parametrize("names", ["properties", "patternProperties", "$defs", "definitions"])
def test_a_schema_is_checked_whatever_its_name(names: str, name: str) -> None:
    with pytest.raises(ValueError, match="minProperties is 3"):
        check_json_schema({"type": "object", names: {name: MANY}})


@pytest.mark.parametrize("key", ["const", "default"])
def test_data_is_not_checked_as_a_schema(key: str) -> None:
    check_json_schema({key: MANY, "properties": {"a": {"enum": [MANY]}, "b": {"properties": {"minProperties": {}}}}})


@pytest.mark.parametrize(
    ("schema", "says"),
    [({"const": "a\x01"}, r"const holds .*U\+0001"), ({"enum": ["b", {"k": ["\x7f"]}]}, r"enum holds .*U\+007F")],
)
def test_a_value_that_cannot_be_written_is_refused(schema: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        *({"const": 2**53 + 1}, {"enum": ["a", -(2**60)]}, {"const": {"ids": [2**64]}}, {"enum": [1e20]}),
        *({"type": "integer", "minimum": 2**60 + 3}, {"type": ["null", "integer"], "maximum": -(2**60) - 3}),
        *({"type": "integer", "exclusiveMinimum": 2**53}, {"type": "integer", "minimum": 10**400}, {"minimum": -1e300}),
        *({"maximum": 2**56}, {"type": "number", "minimum": -(10**309)}, {"items": {"exclusiveMaximum": -(2**53)}}),
    ],
)
def test_a_whole_number_that_would_be_another_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"accepted: (whole numbers|numbers) of at most 9007199254740992"):
        check_json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        *({"const": 2**53}, {"enum": [0.5, 1e-7, True, -(2**53)]}, {"default": 2**64}, {"minimum": 2**53 - 1}),
        *({"type": "integer", "minimum": 0, "maximum": limit} for limit in (2**53, 2**60 + 5, 2**63 - 1, 2**64 - 1)),
        *({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**53}, {"type": "string", "minimum": 2**60 + 1}),
    ],
)
def test_whole_numbers_that_stay_and_bounds_that_let_no_more_pass_compile(
    schema: dict[str, object], compiler: GrammarCompiler
) -> None:
    assert compiler.compile(Grammar("json_schema", json.dumps(schema))).exception() is None


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**60 + 5}, {str(2**60): True, str(2**60 + 6): False}),
        ({"const": 2**53}, {str(2**53): True, str(2**53 + 1): False}),
    ],
)
def test_large_numbers_are_held_to_exactly_or_to_less(
    schema: dict[str, object], texts: dict[str, bool], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    compiled = compiler.compile(Grammar("json_schema", json.dumps(schema))).result()
    for text, is_taken in texts.items():
        matcher = compiled.new_matcher(frozenset({EOS}))
        takes = []
        for token_id in tokenizer.encode(text):
            takes.append(token_id in _allowed(matcher))
            if takes[-1]:
                matcher.accept(token_id)
        assert (all(takes) and EOS in _allowed(matcher)) == is_taken


def test_a_value_of_what_json_escapes_shortly_is_taken() -> None:
    check_json_schema({"const": '\b\f\n\r\t"\\/\u2028'})


def test_an_object_has_so_many_optional_properties() -> None:
    names = [f"p{i}" for i in range(2001)]
    properties = {name: {"type": "string"} for name in names}
    check_json_schema({"properties": properties, "required": names[:1]})
    with pytest.raises(ValueError, match="properties has 2001 that are not required; accepted: at most 2000"):
        check_json_schema({"properties": properties})
