"""Texts to tokens and back, as transformers does it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.errors import CheckpointError, InvalidRequest
from engine.text.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer
from tests.support.tiny_tokenizer import (
    SPECIAL_TOKENS,
    build_sentencepiece_tokenizer,
    build_tokenizer,
    make_tokenizer,
    tokenizer_config,
)

TEXTS = [
    "",
    " ",
    "hello the system",
    "  two  spaces \n\n and\ttabs",
    "<|im_start|>user\nhi<|im_end|>",
    "é€😀 漢字 \u200d",
    "a .b ! n't 'm",
    "\x00\x7f",
    "<tool> x </tool><extra>",
]
BYTE_LEVEL = Tokenizer(build_tokenizer(), None)

DECLARED: dict[str, Any] = {
    "added_tokens_decoder": {
        "293": {"content": "<|endoftext|>", "special": True, "normalized": False},
        "296": {"content": "<tool>", "special": False, "normalized": False, "lstrip": True, "rstrip": True},
        "297": {"content": "</tool>", "special": False, "normalized": True},
    },
    "eos_token": "</tool>",
    "bos_token": "<extra>",
}


def write(path: Path, tokenizer: LibraryTokenizer, config: dict[str, Any] | None) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def assert_equal_with_transformers(path: Path) -> None:
    ours, theirs = Tokenizer.from_directory(path), PreTrainedTokenizerFast.from_pretrained(path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_token_ids == {
        token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


def with_begin_of_text() -> LibraryTokenizer:
    """A byte-level tokenizer that puts a token in front, as Llama 3's does."""
    tokenizer = build_tokenizer()
    begin = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|endoftext|> $A", pair="$A $B", special_tokens=[begin]),
        ]
    )
    return tokenizer


def with_truncation_and_padding() -> LibraryTokenizer:
    tokenizer = build_tokenizer()
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=8, pad_token="<|endoftext|>")
    return tokenizer


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        tokenizer_config(),
        DECLARED,
        {"eos_token": {"__type": "AddedToken", "content": "<tool>", "lstrip": True, "special": True}},
        {"additional_special_tokens": ["<tool>", "<extra>"], "pad_token": "<|endoftext|>"},
        {"extra_special_tokens": {"image_token": "<extra>"}},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"split_special_tokens": True, "eos_token": "<|im_end|>"},
        {"clean_up_tokenization_spaces": True},
    ],
)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, config: dict[str, Any] | None) -> None:
    assert_equal_with_transformers(write(tmp_path, build_tokenizer(), config))


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_begin_of_text(),
        with_truncation_and_padding(),
        build_sentencepiece_tokenizer(),
        build_sentencepiece_tokenizer(metaspace=True),
    ],
    ids=["begin_of_text", "truncation_and_padding", "sentencepiece", "metaspace"],
)
def test_other_kinds_of_tokenizer_are_those_of_transformers_too(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    assert_equal_with_transformers(write(tmp_path, tokenizer, config))


def test_named_tokens_of_older_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, build_tokenizer(), {})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<extra>"}))
    assert_equal_with_transformers(tmp_path)
    assert Tokenizer.from_directory(tmp_path).encode("<extra>") == [296]


def test_the_token_in_front_is_added_only_on_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, with_begin_of_text(), None))
    assert tokenizer.encode("a")[1:] == tokenizer.encode("a", add_special_tokens=False)


def test_a_long_text_is_not_truncated_and_a_short_one_not_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, with_truncation_and_padding(), None))
    assert len(tokenizer.encode("!" * 50)) == 50
    assert len(tokenizer.encode("!")) == 1


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False) == text


@given(st.text())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    assert b"".join(map(BYTE_LEVEL.token_bytes, BYTE_LEVEL.encode(text))) == text.encode()


def test_a_token_reads_as_it_does_inside_a_text() -> None:
    (the,) = BYTE_LEVEL.encode(" the")
    assert BYTE_LEVEL.token_text(the) == " the"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.encode("é")[0]) == "\ufffd"
    assert BYTE_LEVEL.token_text(max(BYTE_LEVEL.special_token_ids)) == "<|im_end|>"
    sentencepiece = Tokenizer(build_sentencepiece_tokenizer(), None)
    assert sentencepiece.token_text(2) == " the"
    assert sentencepiece.token_bytes(sentencepiece.encode("ü")[-1]) == b"\xbc"


def test_ids_the_tokenizer_does_not_know_are_nothing() -> None:
    unknown = BYTE_LEVEL.vocab_size
    assert BYTE_LEVEL.token_bytes(unknown) == b""
    assert BYTE_LEVEL.token_text(unknown) == ""
    assert BYTE_LEVEL.decode([unknown, *BYTE_LEVEL.encode("a")]) == "a"


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = BYTE_LEVEL.encode("a<|im_end|>")
    assert BYTE_LEVEL.decode(ids) == "a"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "a<|im_end|>"
    assert len(BYTE_LEVEL.special_token_ids) == len(SPECIAL_TOKENS)


@pytest.mark.parametrize(("text", "position"), [("\ud800", 0), ("abc\udfffd", 3)])
def test_a_lone_surrogate_is_the_fault_of_the_request(text: str, position: int) -> None:
    with pytest.raises(InvalidRequest, match=f"at character {position}") as caught:
        BYTE_LEVEL.encode(text)
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
    str(caught.value).encode()  # the message itself can be written to a file


def test_a_template_comes_with_the_tokenizer(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    template = Tokenizer.from_directory(tmp_path).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}], datetime.now(UTC)).startswith(
        "<|im_start|>user\nhi<|im_end|>\n"
    )
    assert BYTE_LEVEL.chat_template is None


@pytest.mark.parametrize("content", [None, b"{}", b"[]", b"{", b"\xff"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"added_tokens_decoder": {"400": {"content": "<tool>"}}},
            "gives '<tool>' id 400, tokenizer.json gives it 296",
        ),
        ({"added_tokens_decoder": {"x": {"content": "<tool>"}}}, "added_tokens_decoder holds 'x'"),
        ({"added_tokens_decoder": []}, r"added_tokens_decoder is \[\]"),
        ({"eos_token": 7}, "eos_token is 7"),
        ({"chat_template": 7}, "chat_template holds 7"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Tokenizer.from_directory(write(tmp_path, build_tokenizer(), config))


def test_removing_spaces_is_refused_where_transformers_would_do_it(tmp_path: Path) -> None:
    tokenizer = LibraryTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Whitespace()
    write(tmp_path, tokenizer, {"clean_up_tokenization_spaces": True})
    with pytest.raises(CheckpointError, match="clean_up_tokenization_spaces is true for a WordLevel tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)  # sparse: takes no room
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: 134217729 bytes; accepted: at most 134217728"):
        Tokenizer.from_directory(tmp_path)


def test_a_batch_is_encoded_as_its_texts_are() -> None:
    texts = ["", "the you are", "a<|im_end|>b", "é😀 " * 50]
    for special in (True, False):
        ids = BYTE_LEVEL.encode_batch(texts, add_special_tokens=special)
        assert ids == [BYTE_LEVEL.encode(text, add_special_tokens=special) for text in texts]
    assert BYTE_LEVEL.encode_batch([]) == []


def test_a_batch_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D83D"):
        BYTE_LEVEL.encode_batch(["a", "\ud83d"])
