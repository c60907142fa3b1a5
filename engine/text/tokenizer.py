"""Turns text into token ids and back, as a checkpoint's tokenizer.json says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Self

import tokenizers

from engine.checkpoint.config_reader import check_size, read_json_object
from engine.checkpoint.files import MAX_TOKENIZER_BYTES, TOKENIZER_FILE
from engine.errors import CheckpointError, InvalidRequest
from engine.text.chat_template import ChatTemplate, check_encodable, read_chat_templates
from engine.text.detokenizer import ByteLevelDetokenizer, IncrementalDetokenizer, TokenDecoder, WindowDetokenizer
from engine.text.inputs import EncodedInput, TextPair, TruncationSide, cut

CONFIG_FILE = "tokenizer_config.json"
MAX_TOKENIZER_CONFIG_BYTES = 16 << 20  # the largest published ones, thousands of added tokens, are below 2 MB
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")

MAX_KEPT_CHARACTERS = 1_000_000  # of encoded parts, twice that for a while: at most some 30 MB with their ids
# What of the library changes a piece of text by the piece alone, but for where a text begins, and without chance.
_PIECEWISE = frozenset(
    {
        "Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Replace", "Prepend", "Nmt",
        "Precompiled", "BertNormalizer", "ByteLevel", "Metaspace", "Split", "Whitespace", "WhitespaceSplit",
        "Punctuation", "Digits", "BertPreTokenizer", "CharDelimiterSplit",
    }
)  # fmt: skip


class Tokenizer:
    """The tokenizer of one model: tokenizer.json, tokenizer_config.json and the chat template.

    Ids are those of transformers' fast tokenizer over the same files. Spaces before punctuation are never removed on
    decoding (transformers 5 ignores clean_up_tokenization_spaces for BPE; elsewhere a file that asks is refused).
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        truncation_side: TruncationSide = "right",
    ) -> None:
        """Takes the library's tokenizer over and changes it: no truncation, no padding."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}  # of the tokens that were asked for
        self._part_encoder = None if chat_template is None else PartEncoder.of(tokenizer, chat_template)
        self.chat_template = chat_template
        self.truncation_side = truncation_side  # the end at which `encode_inputs` cuts a text
        self.special_token_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # One more than the highest id; the model's embedding may have further rows, which decode to nothing.
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def unknown_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Ids below `vocab_size` that mean nothing: rows an embedding was padded with, holes in the vocabulary."""
        known = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
        return tuple(token_id for token_id in range(vocab_size) if token_id not in known)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a model directory. Raises CheckpointError naming file and key."""
        config = _read_tokenizer_config(path)
        tokenizer = _read(path / TOKENIZER_FILE)
        kind = type(tokenizer.model).__name__
        if config.get("clean_up_tokenization_spaces") and kind != "BPE":
            raise CheckpointError(
                f"tokenizer_config.json: clean_up_tokenization_spaces is true for a {kind} tokenizer; accepted: false"
            )
        _complete(tokenizer, config)
        templates = read_chat_templates(path, config)
        template = ChatTemplate(templates, _named_special_tokens(config)) if templates else None
        found = cls(tokenizer, template, _truncation_side(tokenizer, config))
        found._decoder  # noqa: B018 (a decoder that is not supported is refused now, not with the first token)
        return found

    @classmethod
    def for_encoding(cls, path: Path) -> Tokenizer:
        """The tokenizer of a model that generates nothing: it has no chat template.

        Any decoder will do, but decoding raises CheckpointError if it is not supported (WordPiece).
        """
        tokenizer, config = _read(path / TOKENIZER_FILE), _read_tokenizer_config(path)
        _complete(tokenizer, config)
        return cls(tokenizer, None, _truncation_side(tokenizer, config))

    @cached_property
    def _decoder(self) -> TokenDecoder:
        decoder = self._tokenizer.decoder
        return TokenDecoder(None if decoder is None else json.loads(decoder.__getstate__()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it become their ids.

        `add_special_tokens`: whether to add what the tokenizer puts around a text (Llama's beginning-of-text).
        Raises InvalidRequest (param "prompt") for a lone surrogate.
        """
        check_encodable(text, param="prompt")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, but cheaper: on all cores, without offsets, and other Python threads run meanwhile.

        What conversations share, such as a system prompt, is encoded once where that is exact, see PartEncoder. Raises
        InvalidRequest if any of them has a lone surrogate.
        """
        for text in texts:
            check_encodable(text, param="prompt")
        if self._part_encoder is not None and not (add_special_tokens and self._part_encoder.others_add_tokens):
            return self._part_encoder.encode_batch(texts)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_inputs(
        self, texts: Sequence[str | TextPair], limits: Sequence[int | None]
    ) -> list[EncodedInput | InvalidRequest]:
        """Texts, and pairs of texts, with the special tokens that the tokenizer puts around them.

        limits: for each, the tokens that it is cut to, special ones included, as transformers cuts ("longest_first",
        at `truncation_side`); None: not cut. In place of one whose limit leaves no room for any of its text stands the
        refusal (param "truncate_prompt_tokens"). Raises InvalidRequest for a lone surrogate (param "prompt").
        """
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                check_encodable(part, param="prompt")
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [cut(*each, self.truncation_side) for each in zip(encodings, limits, strict=True)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids the tokenizer does not know give nothing, bytes that are no UTF-8 give U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as it reads inside a text, leading space included; U+FFFD where it is no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for inside a text; none for an id the tokenizer does not know."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._decoder.token_bytes(token)
        return found

    def new_detokenizer(self, *, goes_on: bool = False) -> IncrementalDetokenizer:
        """Decoding of one sequence as its tokens come, without the special ones.

        `goes_on`: text stands in front of it, so that a space that it begins with is kept: SentencePiece's decoders
        strip one at the start of a text.
        """
        skipped = self.special_token_ids
        if self._decoder.byte_level:
            return ByteLevelDetokenizer(lambda token_id: b"" if token_id in skipped else self.token_bytes(token_id))
        return WindowDetokenizer(
            self.decode,
            is_byte=self._is_byte,
            is_skipped=self._is_skipped,
            before=self._token_with_text if goes_on else (),
        )

    @cached_property
    def _token_with_text(self) -> tuple[int, ...]:
        """Any one that is a character or more wherever it stands; none if there is none."""
        ids = (i for i in range(self.vocab_size) if not (self._is_skipped(i) or self._is_byte(i)))
        return tuple(islice((i for i in ids if self.decode([i]).strip()), 1))

    def _is_skipped(self, token_id: int) -> bool:
        return token_id in self.special_token_ids or self._tokenizer.id_to_token(token_id) is None

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and self._decoder.is_byte_token(token)


class PartEncoder:
    """Encodes conversations in parts and remembers the parts: of most only the question is new. Thread-safe.

    A text is cut before each of the special tokens that the chat template writes. This is exact: the library takes
    added tokens out of a text before all else, and then normalises, splits and encodes what stands between them piece
    by piece, each by itself alone, but for that at the text's beginning (Metaspace's prefix may be for it only). That
    one stays the first: each other part begins with its token. `of` reads off a tokenizer whether all this is so.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, tokens: Collection[str], *, others_add_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens = re.compile("|".join(map(re.escape, tokens)))
        self.others_add_tokens = others_add_tokens  # whether a text with `add_special_tokens` would get some
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[int, ...]] = {}
        self._kept_before: dict[str, tuple[int, ...]] = {}  # given up when `_kept` is full again, but for what was used
        self._num_kept_characters = 0

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, template: ChatTemplate) -> Self | None:
        """The encoder of parts; None where it would not be exact for all texts, or no token is known to cut before."""
        states = [part.__getstate__() for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
        kinds = {kind for state in states for kind in re.findall(r'"type":"(\w+)"', state.decode())}
        ends = _post_processors(tokenizer)
        is_exact = (
            kinds <= _PIECEWISE
            and not tokenizer.encode_special_tokens  # which takes them for text
            and not getattr(tokenizer.model, "dropout", None)
            and all(_keeps_order(end) for end in ends)
        )
        tokens = [token for token in _certain_tokens(tokenizer) if template.writes(token)] if is_exact else []
        others_add_tokens = any(end["type"] != "ByteLevel" for end in ends)
        return cls(tokenizer, tokens, others_add_tokens=others_add_tokens) if tokens else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, without tokens that the tokenizer puts around it."""
        cut = [self._parts(text) for text in texts]
        wanted = dict.fromkeys(part for parts in cut for part in parts)
        known = self._known(wanted)
        new = [part for part in wanted if part not in known]
        if new:
            encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
            found = {part: tuple(encoding.ids) for part, encoding in zip(new, encodings, strict=True)}
            known |= found
            # A text that is one part is no conversation: it hardly comes again.
            whole = {parts[0] for parts in cut if len(parts) == 1}
            self._keep({part: ids for part, ids in found.items() if part not in whole})
        return [list(chain.from_iterable(map(known.__getitem__, parts))) for parts in cut]

    def _parts(self, text: str) -> list[str]:
        starts = [match.start() for match in self._tokens.finditer(text)]
        return [text[start:end] for start, end in pairwise((0, *starts, len(text))) if start < end] or [text]

    def _known(self, wanted: Collection[str]) -> dict[str, tuple[int, ...]]:
        known: dict[str, tuple[int, ...]] = {}
        again: dict[str, tuple[int, ...]] = {}
        with self._lock:
            for part in wanted:
                if part in self._kept:
                    known[part] = self._kept[part]
                elif part in self._kept_before:
                    again[part] = self._kept_before[part]
        self._keep(again)
        return known | again

    def _keep(self, encoded: Mapping[str, tuple[int, ...]]) -> None:
        with self._lock:
            for part, ids in encoded.items():
                if self._num_kept_characters + len(part) > MAX_KEPT_CHARACTERS:
                    self._kept_before, self._kept, self._num_kept_characters = self._kept, {}, 0
                if len(part) <= MAX_KEPT_CHARACTERS and part not in self._kept:
                    self._kept[part] = ids
                    self._num_kept_characters += len(part)


def _post_processors(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.post_processor is None:
        return []
    state: dict[str, Any] = json.loads(tokenizer.post_processor.__getstate__())
    return list(state["processors"]) if state["type"] == "Sequence" else [state]


def _keeps_order(post_processor: Mapping[str, Any]) -> bool:
    """Whether it leaves a text's ids as they are where no special tokens are added."""
    if post_processor["type"] == "TemplateProcessing":
        return sum("Sequence" in piece for piece in post_processor["single"]) == 1
    return post_processor["type"] in ("ByteLevel", "BertProcessing", "RobertaProcessing")


def _certain_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Special tokens that are found wherever a text has them, and change nothing in front of them.

    Those that need a border of a word, take spaces in front or are looked for only in normalised text are none of them,
    nor one that an other token may overlap, which would be found in its place.
    """
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    texts = [token.content for token in added]
    return [
        token.content
        for token in added
        if token.special
        and not (token.single_word or token.lstrip)
        and re.match(r"[!-/:-@\[-^`{-~]", token.content)  # no letter: a token before it may end with a word's end
        and not any(_may_cover(other, token.content) for other in texts)
    ]


def _may_cover(other: str, token: str) -> bool:
    """Whether `other` may lie over the beginning of `token` in a text."""
    if other != token and token in other:
        return True
    return any(token.startswith(other[start:]) for start in range(1, len(other)))


def _read(file: Path) -> tokenizers.Tokenizer:
    check_size(file, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file}: not a valid tokenizer: {error}") from error


def _read_tokenizer_config(path: Path) -> dict[str, object]:
    """tokenizer_config.json of a model directory, or {} if there is none. Raises CheckpointError.

    Files from before `added_tokens_decoder` keep named tokens in special_tokens_map.json: those are merged in.
    """
    file = path / CONFIG_FILE
    config = read_json_object(file, max_bytes=MAX_TOKENIZER_CONFIG_BYTES) if file.exists() else {}
    legacy = path / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.exists():
        config |= read_json_object(legacy, max_bytes=MAX_TOKENIZER_CONFIG_BYTES)
    return config


def _truncation_side(tokenizer: tokenizers.Tokenizer, config: Mapping[str, object]) -> TruncationSide:
    """What tokenizer_config.json says, else the truncation that tokenizer.json asks for, as in transformers."""
    side = config.get("truncation_side")
    if side is None:
        side = "right" if tokenizer.truncation is None else tokenizer.truncation["direction"]
    if side not in ("left", "right"):
        raise CheckpointError(f"{CONFIG_FILE}: truncation_side is {side!r}; accepted: left or right")
    return side


def _named_special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens by their names (`eos_token`...), as a chat template sees them. Raises CheckpointError."""
    extra = config.get("extra_special_tokens")
    values = dict(config) | (extra if isinstance(extra, dict) else {})
    # A model may name tokens of its own: any string under a key that ends so.
    names = [*NAMED_TOKENS, *(extra if isinstance(extra, dict) else ())]
    names += [key for key, value in config.items() if key.endswith("_token") and isinstance(value, str)]
    found = {name: values[name] for name in dict.fromkeys(names) if values.get(name) is not None}
    return {name: _content(name, value) for name, value in found.items()}


def _complete(tokenizer: tokenizers.Tokenizer, config: Mapping[str, object]) -> None:
    """Add what tokenizer_config.json declares and tokenizer.json lacks, as transformers does: mostly tokens.

    Raises CheckpointError if a declared token ends up under another id than the declared one.
    """
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    named = _named_special_tokens(config)
    declared = _declared(config)
    tokens = [
        _added_token(value, special=value.get("special") is True or value["content"] in named.values())
        for _, value in sorted(declared.items())
    ]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {str(value["content"]) for value in declared.values()}
    for name in (*named, *_unnamed(config)):
        value = config.get(name, named.get(name, name))
        content = named.get(name, name)
        if content not in known:
            known.add(content)
            token = {"content": content} | (value if isinstance(value, dict) else {})
            tokens.append(_added_token(token, special=True))
    tokenizer.add_tokens(tokens)
    for token_id, value in declared.items():
        found = tokenizer.token_to_id(str(value["content"]))
        if found != token_id:
            raise CheckpointError(
                f"{CONFIG_FILE}: added_tokens_decoder gives {value['content']!r} id {token_id}, "
                f"tokenizer.json gives it {found}"
            )


def _declared(config: Mapping[str, object]) -> dict[int, dict[str, object]]:
    table = config.get("added_tokens_decoder", {})
    if not isinstance(table, dict):
        raise CheckpointError(f"{CONFIG_FILE}: added_tokens_decoder is {table!r}; accepted: an object")
    declared: dict[int, dict[str, object]] = {}
    for token_id, value in table.items():
        if not token_id.isdecimal() or not isinstance(value, dict):
            raise CheckpointError(
                f"{CONFIG_FILE}: added_tokens_decoder holds {token_id!r}: {value!r}; accepted: a token id and an object"
            )
        _content(f"added_tokens_decoder: {token_id}", value)
        declared[int(token_id)] = value
    return declared


def _unnamed(config: Mapping[str, object]) -> list[str]:
    tokens: list[str] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(key)
        if isinstance(value, list):
            tokens += [_content(key, item) for item in value]
    return tokens


def _added_token(value: Mapping[str, object], *, special: bool) -> tokenizers.AddedToken:
    flags = {flag: bool(value[flag]) for flag in TOKEN_FLAGS if flag in value}
    return tokenizers.AddedToken(str(value["content"]), special=special, **flags)


def _content(key: str, value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise CheckpointError(f"{CONFIG_FILE}: {key} is {value!r}; accepted: a token's text, or an object with it")
    return content
