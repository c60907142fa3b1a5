"""An embedding line to what the engine runs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import EmbeddingRequest
from engine.text.tokenizer import Tokenizer
from worker.lines.embedding_body import EmbeddingBody
from worker.requests.attempt import attempt
from worker.requests.encode_each import encode_each


class EmbeddingBuilder:
    """Tokenises the inputs of embedding lines, for one model."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len  # tokens one input may have

    def build_all(self, bodies: Sequence[tuple[EmbeddingBody, str]], tenant: str) -> list[EmbeddingRequest | Exception]:
        """The engine's request for each (body, request id), or PromptTooLong, or what encoding one of its texts raises.

        All texts are tokenised together.
        """
        texts = [item for body, _ in bodies for item in body.input if isinstance(item, str)]
        encoded = iter(encode_each(self._tokenizer, texts))
        inputs = [[next(encoded) if isinstance(item, str) else item for item in body.input] for body, _ in bodies]
        return [
            attempt(self._request, body, found, request_id, tenant)
            for (body, request_id), found in zip(bodies, inputs, strict=True)
        ]

    def _request(
        self, body: EmbeddingBody, found: Sequence[Sequence[int] | Exception], request_id: str, tenant: str
    ) -> EmbeddingRequest:
        inputs: list[Sequence[int]] = []
        for index, token_ids in enumerate(found):
            if isinstance(token_ids, Exception):
                raise token_ids
            inputs.append(token_ids)
            param = body.param_of(index)
            if not token_ids:  # a text of which the tokeniser makes nothing
                raise InvalidRequest(
                    f"{param} has no tokens", param=param, accepted="at least one token", code="empty_prompt"
                )
            if len(token_ids) > self._max_model_len:
                raise PromptTooLong(len(token_ids), self._max_model_len, param=param)
        return EmbeddingRequest(request_id, inputs, body.dimensions, tenant=tenant)
