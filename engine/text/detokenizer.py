"""Decodes token ids to text as they arrive, without ever taking back a character.

Byte-level BPE (Qwen3, Llama 3) is decoded token by token; decoders that look at a token's neighbours (SentencePiece,
Metaspace) over a window.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.errors import CheckpointError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SUPPORTED = "ByteLevel, or a sequence of Replace, ByteFallback, Metaspace, Strip and Fuse, or none"
PER_TOKEN_STEPS = ("Replace", "ByteFallback", "Metaspace", "Strip")


class IncrementalDetokenizer(Protocol):
    """Text of a sequence as its tokens come. All pieces joined equal decoding all ids at once.

    Each token costs amortised constant time, however long the sequence. `Tokenizer.new_detokenizer` makes one.
    """

    def append(self, token_id: int) -> str:
        """Add a token; returns the text that no later token can change, possibly nothing."""

    def flush(self) -> str:
        """End the sequence; returns what was withheld. No token may follow."""


class ByteLevelDetokenizer:
    """Takes each token as bytes of UTF-8, and withholds only an incomplete character.

    Bytes that are no UTF-8 become U+FFFD by the rule of the Unicode standard (one for each maximal subpart), which is
    also that of the `tokenizers` library.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of`: a token's bytes; none for a token that is to be skipped."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_id: int) -> str:
        """See IncrementalDetokenizer."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """See IncrementalDetokenizer."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes new tokens together with the one before them, then cuts off that one's text.

    Without the token before, the decoder would strip a space, as it does at the start of a text. Byte tokens
    (`<0xE2>`) are withheld until another token ends their run, because the decoder judges a run as a whole: one bad
    byte turns every byte of it into U+FFFD.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        is_byte: Callable[[int], bool],
        is_skipped: Callable[[int], bool],
        before: Sequence[int] = (),
    ) -> None:
        """`decode`: ids to text; `is_byte`: a byte token; `is_skipped`: a token that decodes to nothing; `before`: a
        token of text in front of this one.
        """
        self._decode = decode
        self._is_byte = is_byte
        self._is_skipped = is_skipped
        self._context = list(before)  # the last token whose text was returned, if any
        self._pending: list[int] = []  # tokens whose text was not

    def append(self, token_id: int) -> str:
        """See IncrementalDetokenizer."""
        if self._is_skipped(token_id):
            return ""
        self._pending.append(token_id)
        return "" if self._is_byte(token_id) else self.flush()

    def flush(self) -> str:
        """See IncrementalDetokenizer."""
        if not self._pending:
            return ""
        before = self._decode(self._context) if self._context else ""
        text = self._decode(self._context + self._pending)
        self._context, self._pending = self._pending[-1:], []
        return text[len(before) :]


class TokenDecoder:
    """Gives the bytes of single tokens and says which kind of incremental decoding is exact.

    Decoders that could change text already returned, or that no Llama or Qwen3 tokenizer has, are refused.
    """

    def __init__(self, spec: Mapping[str, object] | None) -> None:
        """`spec`: the `decoder` of tokenizer.json. Raises CheckpointError naming a step that is not supported."""
        steps = _flatten(spec) if spec is not None else []
        kinds = [step.get("type") for step in steps]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self._replacements: list[tuple[str, str]] = []
        if self.byte_level:
            if [kind for kind in kinds if kind != "Fuse"] != ["ByteLevel"]:
                raise _refuse(f"{kinds}")
        else:
            self._read_steps(steps)

    def token_bytes(self, token: str) -> bytes:
        """The bytes a token stands for inside a text, a leading space included."""
        if self.byte_level:
            # As the library does it: a token with any other character (some added tokens) stands for itself.
            codes = [_BYTE_OF_CHARACTER.get(character) for character in token]
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else token.encode()
        if self.is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()

    def is_byte_token(self, token: str) -> bool:
        """Whether a token stands for one byte that may be part of a character."""
        return self.byte_fallback and BYTE_TOKEN.fullmatch(token) is not None

    def _read_steps(self, steps: list[Mapping[str, object]]) -> None:
        fused = False
        for step in steps:
            kind = step.get("type")
            if kind == "Fuse":
                fused = True
            elif kind not in PER_TOKEN_STEPS:
                raise _refuse(f"{kind}")
            elif fused and not _strips_one_leading_character_at_most(step):
                # After Fuse a step sees the whole text: all but this one could change what came before.
                raise _refuse(f"{dict(step)} after Fuse")
            elif kind == "Replace":
                self._replacements.append(_replacement(step))
            elif kind == "Metaspace":
                self._replacements.append((str(step.get("replacement")), " "))


def _strips_one_leading_character_at_most(step: Mapping[str, object]) -> bool:
    return step.get("type") == "Strip" and step.get("start") in (0, 1) and step.get("stop") == 0


def _replacement(step: Mapping[str, object]) -> tuple[str, str]:
    pattern, content = step.get("pattern"), step.get("content")
    if not isinstance(pattern, Mapping) or not isinstance(pattern.get("String"), str) or not isinstance(content, str):
        raise _refuse(f"{dict(step)}")
    return pattern["String"], content


def _flatten(spec: Mapping[str, object]) -> list[Mapping[str, object]]:
    if spec.get("type") != "Sequence":
        return [spec]
    parts = spec.get("decoders")
    if not isinstance(parts, list):
        raise _refuse(f"{dict(spec)}")
    return [step for part in parts for step in _flatten(part)]


def _refuse(found: str) -> CheckpointError:
    return CheckpointError(f"tokenizer.json: decoder: {found} is not supported; accepted: {SUPPORTED}")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the others are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
