from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.tokenizer import Tokenizer
from tests.support.sentencepiece_tokenizer import PIECES, build_sentencepiece_tokenizer
from tests.support.tiny_tokenizer import build_tokenizer

TOKENIZERS = {
    "byte_level": Tokenizer(build_tokenizer(), None),
    "sentencepiece": Tokenizer(build_sentencepiece_tokenizer(), None),
    "metaspace": Tokenizer(build_sentencepiece_tokenizer(metaspace=True), None),
}
KINDS = st.sampled_from(sorted(TOKENIZERS))


def pieces(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=400)
@given(KINDS, st.lists(st.integers(0, 330), max_size=40), st.booleans())
def test_the_pieces_joined_equal_decoding_at_once(kind: str, ids: list[int], skip: bool) -> None:
    # Ids up to 330: all bytes and pieces, the special tokens and some that the tokenizer does not know.
    tokenizer = TOKENIZERS[kind]
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


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
    if kind == "byte_level":
        assert "".join(pieces(tokenizer, ids, skip=False)) == text


def test_every_bad_sequence_of_bytes_is_replaced_as_the_library_does() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(256)}
    interesting = [0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0xFF]
    for data in itertools.product(interesting, repeat=4):
        sequence = [ids[bytes([byte])] for byte in data]
        assert "".join(pieces(tokenizer, sequence)) == tokenizer.decode(sequence)


def test_a_character_is_held_until_its_last_byte() -> None:
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
    assert "".join(pieces(tokenizer, ids, skip=False)) == "a<s> b"


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_the_cost_of_a_token_does_not_grow_with_the_sequence(kind: str) -> None:
    # 40,000 tokens, half of them a run of bytes that are no character: quadratic work would take minutes.
    tokenizer = TOKENIZERS[kind]
    start_s = time.perf_counter()
    text = "".join(pieces(tokenizer, [5, 260] * 10_000 + [200] * 20_000))
    assert time.perf_counter() - start_s < 20
    assert text
