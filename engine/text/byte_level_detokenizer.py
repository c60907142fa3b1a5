"""Incremental decoding for byte-level BPE (Qwen3, Llama 3)."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class ByteLevelDetokenizer:
    """Every token is a string of bytes and the text is their UTF-8: only an incomplete character is held back.

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
