"""A tokeniser whose tokens are bytes: it needs no file and no model."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.chat_template import ChatTemplate


class ByteTokenizer:
    """Stands in for engine.text.tokenizer.Tokenizer where only its methods for requests and records are called."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = None if chat_template is None else ChatTemplate({"default": chat_template}, {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])
