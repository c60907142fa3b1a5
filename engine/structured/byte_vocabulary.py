"""A vocabulary of single bytes."""

from __future__ import annotations

END = 256
MARK = 257  # stands for every special token that a grammar names


class ByteVocabulary:
    """Every byte a token, an end and a mark: what grammars are tried with before they meet the model's vocabulary.

    Its attributes are those that llguidance reads.
    """

    def __init__(self) -> None:
        self.eos_token_id = END
        self.bos_token_id = None
        self.tokens = [*(bytes([byte]) for byte in range(END)), b"<end>", b"<mark>"]
        self.special_token_ids = [END, MARK]

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of a text."""
        return list(text)
