"""An embedding line to what the engine runs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.embedding_request import EmbeddingRequest
from engine.errors import InvalidRequest, PromptTooLong
from engine.text.tokenizer import Tokenizer
from worker.lines.embedding_body import EmbeddingBody, EmbeddingInput


class EmbeddingBuilder:
    """Tokenises the inputs of embedding lines, for one model."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len  # tokens one input may have

    def build(self, body: EmbeddingBody, request_id: str, tenant: str) -> EmbeddingRequest:
        """The engine's request. Raises PromptTooLong, and InvalidRequest for a text that cannot be encoded."""
        return self._request(body, self._encode(body.input), request_id, tenant)

    def build_all(self, bodies: Sequence[tuple[EmbeddingBody, str]], tenant: str) -> list[EmbeddingRequest | Exception]:
        """`build` for each (body, request id), with what it would raise in the place of the request.

        All texts are tokenised together: a third of the time, and other threads run meanwhile.
        """
        try:
            encoded = self._encode([item for body, _ in bodies for item in body.input])
        except Exception:  # a seam: one text is at fault, or several; each line on its own shows which
            return [self._outcome(body, None, request_id, tenant) for body, request_id in bodies]
        built: list[EmbeddingRequest | Exception] = []
        first = 0
        for body, request_id in bodies:
            built.append(self._outcome(body, encoded[first : first + len(body.input)], request_id, tenant))
            first += len(body.input)
        return built

    def _outcome(
        self, body: EmbeddingBody, encoded: Sequence[Sequence[int]] | None, request_id: str, tenant: str
    ) -> EmbeddingRequest | Exception:
        try:
            inputs = self._encode(body.input) if encoded is None else encoded
            return self._request(body, inputs, request_id, tenant)
        except Exception as error:  # a seam: what a tokeniser may raise over one line stays with it
            return error

    def _encode(self, inputs: Sequence[EmbeddingInput]) -> list[Sequence[int]]:
        texts = [item for item in inputs if isinstance(item, str)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        return [next(encoded) if isinstance(item, str) else item for item in inputs]

    def _request(
        self, body: EmbeddingBody, inputs: Sequence[Sequence[int]], request_id: str, tenant: str
    ) -> EmbeddingRequest:
        for index, token_ids in enumerate(inputs):
            param = body.param_of(index)
            if not token_ids:  # a text of which the tokeniser makes nothing
                raise InvalidRequest(
                    f"{param} has no tokens", param=param, accepted="at least one token", code="empty_prompt"
                )
            if len(token_ids) > self._max_model_len:
                raise PromptTooLong(len(token_ids), self._max_model_len, param=param)
        return EmbeddingRequest(request_id, inputs, body.dimensions, tenant=tenant)
