"""Incremental decoding for decoders that look at a token's neighbours (SentencePiece, Metaspace)."""

from __future__ import annotations

from collections.abc import Callable


class WindowDetokenizer:
    """Decodes the new tokens behind the last one before them, and takes that one's text off again.

    The one token of context keeps the decoder from treating the new ones as the start of the text, where it strips a
    space. Byte tokens (`<0xE2>`) are held until another token ends their run, however long, because the decoder
    judges a run as a whole: one bad byte turns every byte of it into U+FFFD.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        is_byte: Callable[[int], bool],
        is_skipped: Callable[[int], bool],
    ) -> None:
        """`decode`: ids to text; `is_byte`: a byte token; `is_skipped`: a token that decodes to nothing."""
        self._decode = decode
        self._is_byte = is_byte
        self._is_skipped = is_skipped
        self._context: list[int] = []  # the last token whose text was returned, if any
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
