"""Tokens to text as they come, cut at stop strings."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from engine.errors import CheckpointError
from engine.outputs import StopStrings
from engine.text.detokenizer import TokenDecoder
from engine.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import PIECES, build_sentencepiece_tokenizer, build_tokenizer

TOKENIZERS = {
    "byte_level": Tokenizer(build_tokenizer(), None),
    "sentencepiece": Tokenizer(build_sentencepiece_tokenizer(), None),
    "metaspace": Tokenizer(build_sentencepiece_tokenizer(metaspace=True), None),
}
KINDS = st.sampled_from(sorted(TOKENIZERS))

LLAMA_2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4).map(tuple)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], *, goes_on: bool = False) -> list[str]:
    detokenizer = tokenizer.new_detokenizer(goes_on=goes_on)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=400)
@given(KINDS, st.lists(st.integers(0, 330), max_size=40))
def test_the_pieces_joined_equal_decoding_at_once(kind: str, ids: list[int]) -> None:
    # Ids up to 330: all bytes and pieces, the special tokens and some that the tokenizer does not know.
    tokenizer = TOKENIZERS[kind]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=400)
@given(KINDS, st.lists(st.integers(0, 330), max_size=40), st.sampled_from(["a", "a b", "b."]))
def test_a_text_that_goes_on_is_what_it_adds_to_what_stands_in_front(kind: str, ids: list[int], front: str) -> None:
    tokenizer = TOKENIZERS[kind]
    whole = tokenizer.decode([*tokenizer.encode(front), *ids])
    assert whole == front + "".join(pieces(tokenizer, ids, goes_on=True))


@settings(max_examples=200)
@given(st.lists(st.integers(1, len(PIECES) + 256), max_size=30))
def test_pieces_and_bytes_mixed_equal_decoding_at_once(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(KINDS, st.text())
def test_the_pieces_of_an_encoded_text_equal_decoding_at_once(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_every_bad_sequence_of_bytes_is_replaced_as_the_library_does() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    interesting = [0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0xFF]
    for data in itertools.product(interesting, repeat=4):
        sequence = [ids[bytes([byte])] for byte in data]
        assert "".join(pieces(tokenizer, sequence)) == tokenizer.decode(sequence)


def test_a_character_is_withheld_until_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a€😀b")
    assert len(ids) == 1 + 3 + 4 + 1
    assert pieces(tokenizer, ids) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_an_incomplete_character_at_the_end_is_flushed_as_a_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert pieces(tokenizer, tokenizer.encode("a😀")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_only_the_first_space_is_stripped() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [1 + PIECES.index(piece) for piece in ("▁the", "▁a", "▁", "▁b")]
    assert pieces(tokenizer, ids) == ["the", " a", " ", " b", ""]


def test_a_skipped_special_token_does_not_start_the_text_anew() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    special = min(tokenizer.special_token_ids)
    ids = [1 + PIECES.index("▁a"), special, 1 + PIECES.index("▁b")]
    assert pieces(tokenizer, ids) == ["a", "", " b", ""]


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_the_cost_of_a_token_does_not_grow_with_the_sequence(kind: str) -> None:
    # 40,000 tokens, half of them a run of bytes that are no character: quadratic work would take minutes.
    tokenizer = TOKENIZERS[kind]
    start_s = time.process_time()
    text = "".join(pieces(tokenizer, [5, 260] * 10_000 + [200] * 20_000))
    assert time.process_time() - start_s < 20
    assert text


def make(decoder: Any) -> TokenDecoder:
    return TokenDecoder(json.loads(decoder.__getstate__()))


def test_byte_level_tokens_stand_for_the_bytes_the_library_decodes_them_to() -> None:
    library = decoders.ByteLevel()
    decoder = make(library)
    for character in (chr(code) for code in range(0x400)):
        assert decoder.token_bytes(character).decode(errors="replace") == library.decode([character])
    assert decoder.token_bytes("Ġthe") == b" the"
    assert decoder.token_bytes("Ã©") == "é".encode()
    assert decoder.token_bytes("Ã") == b"\xc3"
    assert decoder.token_bytes("<|x y|>") == b"<|x y|>"


def test_every_byte_has_one_character() -> None:
    decoder = make(decoders.ByteLevel())
    single = [decoder.token_bytes(chr(code)) for code in range(0x180)]
    found = sorted(data[0] for data in single if len(data) == 1 and data >= b"\x80")
    assert set(found) == set(range(0x80, 0x100))


def test_byte_fallback_tokens_stand_for_one_byte() -> None:
    decoder = make(LLAMA_2)
    assert decoder.token_bytes("<0xE2>") == b"\xe2"
    assert decoder.token_bytes("<0xZZ>") == b"<0xZZ>"
    assert decoder.token_bytes("▁the▁") == b" the "
    assert decoder.is_byte_token("<0x0A>")
    assert not decoder.is_byte_token("▁<0x0A>")


def test_without_byte_fallback_nothing_is_a_byte_token() -> None:
    decoder = make(decoders.Metaspace())
    assert not decoder.is_byte_token("<0x0A>")
    assert decoder.token_bytes("<0x0A>") == b"<0x0A>"
    assert decoder.token_bytes("▁a") == b" a"


def test_no_decoder_leaves_tokens_as_they_are() -> None:
    assert TokenDecoder(None).token_bytes("Ġa") == "Ġa".encode()


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]), "ByteLevel"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "after Fuse"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]), "after Fuse"),
    ],
)
def test_a_decoder_that_could_change_earlier_text_is_refused(decoder: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        make(decoder)
    assert "tokenizer.json: decoder:" in str(caught.value)


def naive(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: the text grows by one character at a time and ends as soon as it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    stops = StopStrings(stop)
    text = "".join(stops.feed(piece) for piece in pieces)
    return text + stops.flush(), stops.matched


@settings(max_examples=250)
@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=10), STOPS)
@example(["aaab"], ("aab",))
@example(["aba", "babb"], ("ababb",))
def test_however_the_text_is_cut_the_result_is_that_of_the_naive_search(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    assert run(pieces, stop) == naive("".join(pieces), stop)


@given(LETTERS, STOPS)
def test_what_is_released_never_contains_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    released, matched = run(list(text), stop)
    assert not any(string in released for string in stop)
    assert (matched is None) == (released == text)


@given(LETTERS, STOPS)
def test_no_more_is_withheld_than_may_begin_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stops = StopStrings(stop)
    released = stops.feed(text)
    if stops.matched is None:
        withheld = text[len(released) :]
        assert withheld == "" or any(string.startswith(withheld) and string != withheld for string in stop)
        assert stops.flush() == withheld


def test_a_stop_string_across_pieces_is_found_and_left_out() -> None:
    stops = StopStrings(("</end>",))
    assert stops.feed("a < b </") == "a < b "
    assert stops.feed("en") == ""
    assert stops.feed("d> more") == ""
    assert stops.matched == "</end>"
    assert stops.flush() == ""


def test_what_was_no_stop_string_is_released() -> None:
    stops = StopStrings(("</end>",))
    assert stops.feed("x</e") == "x"
    assert stops.feed("m>") == "</em>"
    assert stops.feed("</") == ""
    assert stops.flush() == "</"
    assert stops.matched is None


def test_after_a_match_nothing_is_released() -> None:
    stops = StopStrings(("b",))
    assert stops.feed("abc") == "a"
    assert stops.feed("def") == ""
    assert stops.matched == "b"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("bcd", "c"), ("ab", "c")),  # "c" is complete before "bcd" is
        (("cd", "bcd"), ("a", "bcd")),  # both are complete at "d": the longer one
        (("cd", "abcde"), ("ab", "cd")),
        ((), ("abcdef", None)),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(stop: tuple[str, ...], expected: tuple[str, str | None]) -> None:
    assert run(["abcdef"], stop) == expected
    assert run(list("abcdef"), stop) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""))


def test_a_long_stop_string_costs_no_more_than_its_length() -> None:
    stops = StopStrings(("a" * 20_000 + "b",))
    released = "".join(stops.feed("a") for _ in range(70_001))
    assert released == "a" * 50_001
    assert stops.flush() == "a" * 20_000
