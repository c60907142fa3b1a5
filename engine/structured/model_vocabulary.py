"""A model's vocabulary as bytes."""

from __future__ import annotations

from collections.abc import Collection

from engine.text.tokenizer import Tokenizer


class ModelVocabulary:
    """What each token of a model writes, and how a text is tokenised. Its attributes are those that llguidance reads.

    Special tokens write nothing; nor do ids that mean nothing. A model without an end of sequence gets one of its own
    behind its vocabulary, which nothing ever chooses.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = sorted(eos_token_ids) or [vocab_size]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.tokens += [b"<end>"] * (self.eos_token_ids[-1] + 1 - vocab_size)
        self.special_token_ids = sorted({*tokenizer.special_token_ids, *self.eos_token_ids})
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = None
        special = frozenset(self.special_token_ids)
        self._written = [b"" if token_id in special else token for token_id, token in enumerate(self.tokens)]
        self._id_of = {token: token_id for token_id, token in enumerate(self._written) if token}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Token ids that write exactly this text, as the tokenizer has it where it can.

        The library forces tokens by this where a grammar leaves only one text. A tokenizer that begins every text with
        a space would force that space.
        """
        token_ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        if b"".join(self._written[token_id] for token_id in token_ids) == text:
            return token_ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            found = next((end for end in ends if text[start:end] in self._id_of), None)
            if found is None:
                break  # the library takes a part of the text too
            token_ids.append(self._id_of[text[start:found]])
            start = found
        return token_ids
