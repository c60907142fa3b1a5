"""Texts to tokens and back, as transformers does it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import PreTrainedTokenizerFast

from engine.checkpoint.files import MAX_TOKENIZER_BYTES
from engine.errors import CheckpointError, InvalidRequest
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import PartEncoder, Tokenizer
from tests.support.tiny_tokenizer import (
    CHAT_TEMPLATE,
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


def with_components(
    *, normalizer: normalizers.Normalizer | None = None, pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
) -> LibraryTokenizer:
    tokenizer = build_tokenizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def with_tokens(*tokens: AddedToken, base: LibraryTokenizer | None = None) -> LibraryTokenizer:
    tokenizer = base or build_tokenizer()
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer


def unigram() -> LibraryTokenizer:
    """What T5's and Gemma's kind is made of, with the prefix at the text's beginning only."""
    pieces = [
        ("<unk>", 0.0),
        *((piece, -float(len(piece))) for piece in ("▁", "▁the", "▁a", "a", "b", "the", "▁b", "\n")),
    ]
    tokenizer = LibraryTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return with_tokens(*(AddedToken(token, normalized=False) for token in SPECIAL_TOKENS), base=tokenizer)


LLAMA_LIKE = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
IN_PARTS = {
    "bytes": build_tokenizer(),
    "token in front": with_begin_of_text(),
    "prefix space": with_components(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "regex": with_components(pre_tokenizer=LLAMA_LIKE),
    "normalizers": with_components(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip(), normalizers.Lowercase()])
    ),
    "prepend": with_tokens(
        *(AddedToken(token, normalized=False) for token in SPECIAL_TOKENS), base=build_sentencepiece_tokenizer()
    ),
    "metaspace": with_tokens(
        *(AddedToken(token, normalized=False) for token in SPECIAL_TOKENS),
        base=build_sentencepiece_tokenizer(metaspace=True),
    ),
    "unigram": unigram(),
    "flagged neighbours": with_tokens(
        AddedToken("<a>", normalized=False, lstrip=True),
        AddedToken("<b>", normalized=False, rstrip=True),
        AddedToken("the", normalized=False, single_word=True),
        AddedToken("YOU", normalized=True),
        AddedToken("\n\n", normalized=False),
    ),
    "overlapped": with_tokens(AddedToken("x<|im_start|>", normalized=False), AddedToken("a<|", normalized=False)),
    "one overlapped": with_tokens(AddedToken("<|im_end|>x", normalized=False)),
}
FRAGMENTS = (
    *SPECIAL_TOKENS, "<|im_", "start|>", "<a>", "<b>", " ", "  ", "\n", "\n\n", "\t", "\u3000",
    "the", " the you", "YOU", "x", "a", "é", "e\u0301", "123", "'s", "▁", "漢字", "😀", ".",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_PARTS)
@given(texts=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), max_size=6))
def test_a_batch_in_parts_has_the_ids_of_its_whole_texts(name: str, texts: list[str]) -> None:
    tokenizer = Tokenizer(IN_PARTS[name], ChatTemplate({"default": CHAT_TEMPLATE}, {}))
    for special in (False, True):
        whole = [IN_PARTS[name].encode(text, add_special_tokens=special).ids for text in texts]
        assert tokenizer.encode_batch(texts, add_special_tokens=special) == whole
        assert tokenizer.encode_batch(texts, add_special_tokens=special) == whole  # from what is remembered


class RecordingTokenizer:
    """The library's, with the texts that it was given."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self._tokenizer = build_tokenizer()

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.encoded += texts
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens)


def test_a_part_that_comes_again_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.tokenizer.MAX_KEPT_CHARACTERS", 100)
    library = RecordingTokenizer()
    parts = PartEncoder(cast("LibraryTokenizer", library), ["<|im_start|>"], others_add_tokens=False)
    system = "<|im_start|>system\nBe brief<|im_end|>\n"
    questions = [f"<|im_start|>user\n{number}" for number in range(20)]
    for question in questions:
        assert parts.encode_batch([system + question, "alone"]) == [
            build_tokenizer().encode(text).ids for text in (system + question, "alone")
        ]
    assert library.encoded.count(system) == 1  # it was used again and again
    assert [text for text in library.encoded if text in questions] == questions
    assert library.encoded.count("alone") == len(questions)  # no conversation: not remembered
    parts.encode_batch([questions[0]])
    assert library.encoded.count(questions[0]) == 2  # long ago


def test_a_text_is_cut_only_where_that_is_exact() -> None:
    template = ChatTemplate({"default": CHAT_TEMPLATE}, {})
    kept, split, twice, unknown = (build_tokenizer() for _ in range(4))
    split.encode_special_tokens = True
    twice.post_processor = processors.TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[])
    unknown.pre_tokenizer = pre_tokenizers.UnicodeScripts()
    by_chance = with_components()
    by_chance.model = models.BPE(vocab={"a": 0}, merges=[], dropout=0.5)
    assert PartEncoder.of(kept, template) is not None
    for tokenizer in (split, twice, unknown, by_chance, IN_PARTS["overlapped"]):
        assert PartEncoder.of(tokenizer, template) is None
    assert PartEncoder.of(IN_PARTS["one overlapped"], template) is not None
    assert PartEncoder.of(kept, ChatTemplate({"default": "{{ messages }}"}, {})) is None


def test_a_batch_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D83D"):
        BYTE_LEVEL.encode_batch(["a", "\ud83d"])
