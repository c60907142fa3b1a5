"""The grammar library and the tokenizer mean the same bytes by a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from engine.structured.compiler import ModelVocabulary
from engine.text.tokenizer import Tokenizer
from tests.support.sentencepiece_tokenizer import build_sentencepiece_tokenizer
from tests.support.tiny_tokenizer import make_tokenizer

EOS = 295


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
