"""Builds the engine's requests for embeddings, scores and classes: what of a line is read as which input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import ParamSpec, TypeVar

from engine.checkpoint.classifier_config import AS_PAIR, ClassActivation, ClassifierConfig
from engine.errors import InvalidRequest, PromptTooLong
from engine.request import ClassificationRequest, EmbeddingRequest, PooledRequest
from engine.text.inputs import EncodedInput, TextPair, cut_ids
from worker.lines.bodies import EmbeddingBody, InputBody, PooledBody
from worker.lines.scoring import ClassifyBody, PairBody
from worker.requests.pair_prompts import PairPrompt, PairPrompts
from worker.requests.step_engine import StepEngine

P = ParamSpec("P")
T = TypeVar("T")

# Characters that are tokenised together: of a token some 100 bytes are kept until it is cut, with all around it.
SLICE_CHARACTERS = 2 << 20

PooledInput = str | TextPair | PairPrompt | EncodedInput  # a text, a pair of them, or the token ids of a line
CutText = tuple[str | TextPair | PairPrompt, int | None]  # with the tokens that it is cut to; None: it is not


class PooledRequestBuilder:
    """For one model. Pairs go to a head of one class in the form that its files ask for; without a head each text is
    embedded by itself.
    """

    def __init__(self, engine: StepEngine) -> None:
        """Raises CheckpointError for a model that scores pairs by a template and has none for them."""
        self._tokenizer = engine.tokenizer
        self._classifier: ClassifierConfig | None = engine.classifier
        form = AS_PAIR if self._classifier is None else self._classifier.pair_form
        self._pair_prompts = PairPrompts(form, engine.tokenizer)
        self._max_model_len = engine.max_model_len

    def build_all(
        self, lines: Sequence[tuple[PooledBody, str]], *, tenant: str, priority: int
    ) -> list[PooledRequest | Exception]:
        """The engine's request for each (body, request id), or what is wrong with it. Texts are tokenised together."""
        found = [attempt(self._inputs, body) for body, _ in lines]
        encoded = iter(
            self._encode_all(
                [
                    (given, self._limit(body))
                    for (body, _), given in zip(lines, found, strict=True)
                    if not isinstance(given, Exception)
                ]
            )
        )
        return [
            given
            if isinstance(given, Exception)
            else attempt(self._request, body, next(encoded), request_id, tenant, priority)
            for (body, request_id), given in zip(lines, found, strict=True)
        ]

    def _inputs(self, body: PooledBody) -> Sequence[PooledInput]:
        """What is to be read. Raises InvalidRequest for a parameter that this model cannot honour."""
        limit = body.truncate_prompt_tokens
        if limit is not None and limit > self._max_model_len:
            raise _refusal("truncate_prompt_tokens", limit, f"at most the context, {self._max_model_len}, or -1")
        if isinstance(body, InputBody):
            cut_at = self._limit(body)
            return [item if isinstance(item, str) else self._given(item, cut_at) for item in body.input]
        if not isinstance(body, PairBody):
            raise TypeError(f"{type(body).__name__} has no inputs")
        if self._classifier is not None:
            return [self._pair_prompts.input_of(pair, body.param_of(at)) for at, pair in enumerate(body.pairs)]
        if not body.use_activation:
            raise _refusal("use_activation", False, "true: this model's scores are cosines of embeddings")
        return [text for _, texts in body.sides for text in texts]

    def _encode_all(
        self, lines: Sequence[tuple[Sequence[PooledInput], int | None]]
    ) -> list[list[EncodedInput | Exception]]:
        """The inputs of each line, cut to its limit, as tokens, or what encoding one raised."""
        texts = [(item, limit) for items, limit in lines for item in items if not isinstance(item, EncodedInput)]
        encoded = chain.from_iterable(map(self._encode_each, _slices(texts)))
        return [[item if isinstance(item, EncodedInput) else next(encoded) for item in items] for items, _ in lines]

    def _request(
        self, body: PooledBody, inputs: Sequence[EncodedInput | Exception], request_id: str, tenant: str, priority: int
    ) -> PooledRequest:
        """Raises what is wrong with an input, naming it."""
        param_of = self._param_of(body)
        checked = [self._checked(item, param_of(index)) for index, item in enumerate(inputs)]
        token_ids = [item.token_ids for item in checked]
        if self._classifier is None:
            dimensions = body.dimensions if isinstance(body, EmbeddingBody) else None
            return EmbeddingRequest(request_id, token_ids, dimensions, priority, tenant)
        starts = [item.second_start for item in checked] if isinstance(body, PairBody) else ()
        activation = _activation(body, self._classifier)
        return ClassificationRequest(request_id, token_ids, activation, starts, priority, tenant)

    def _limit(self, body: PooledBody) -> int | None:
        limit = body.truncate_prompt_tokens
        return self._max_model_len if limit == -1 else limit

    def _encode_each(self, texts: Sequence[CutText]) -> Sequence[EncodedInput | Exception]:
        try:
            return self._encode_together(texts)
        except Exception:  # a seam: one text is at fault, or several; each on its own shows which
            return [attempt(self._encode, *each) for each in texts]

    def _encode_together(self, texts: Sequence[CutText]) -> Sequence[EncodedInput | Exception]:
        plain = [(text, limit) for text, limit in texts if not isinstance(text, PairPrompt)]
        written = [(text, limit) for text, limit in texts if isinstance(text, PairPrompt)]
        encoded = iter(self._tokenizer.encode_inputs([text for text, _ in plain], [limit for _, limit in plain]))
        prompts = iter(self._pair_prompts.encode(written))
        return [next(prompts if isinstance(text, PairPrompt) else encoded) for text, _ in texts]

    def _encode(self, text: str | TextPair | PairPrompt, limit: int | None) -> EncodedInput | Exception:
        (encoded,) = self._encode_together([(text, limit)])
        return encoded

    def _given(self, token_ids: Sequence[int], limit: int | None) -> EncodedInput:
        """Token ids are taken as they are, and cut at the end at which texts are."""
        ids = cut_ids(token_ids, limit, self._tokenizer.truncation_side)
        return EncodedInput(ids, len(ids))

    def _param_of(self, body: PooledBody) -> Callable[[int], str]:
        """What error messages call an input: its place in the line."""
        if isinstance(body, PairBody) and self._classifier is None:
            return body.text_param_of
        return body.param_of

    def _checked(self, item: EncodedInput | Exception, param: str) -> EncodedInput:
        if isinstance(item, Exception):
            raise item
        if not item.token_ids:  # a text of which the tokeniser makes nothing
            raise InvalidRequest(f"{param} has no tokens", param=param, code="empty_prompt")
        if len(item.token_ids) > self._max_model_len:
            # What can never run must not wait at full size until it is its turn.
            raise PromptTooLong(len(item.token_ids), self._max_model_len, param=param)
        return item


def _refusal(param: str, value: object, accepted: str) -> InvalidRequest:
    said = "false" if value is False else value
    return InvalidRequest(f"{param} is {said}; accepted: {accepted}", param=param, value=value, accepted=accepted)


def _slices(texts: Sequence[CutText]) -> Iterator[Sequence[CutText]]:
    """The texts in order, as many together as have SLICE_CHARACTERS; one that has more is alone."""
    start, num_characters = 0, 0
    for index, (text, _) in enumerate(texts):
        own = len(text) if isinstance(text, str) else sum(map(len, text))
        if num_characters + own > SLICE_CHARACTERS and index > start:
            yield texts[start:index]
            start, num_characters = index, 0
        num_characters += own
    if start < len(texts):
        yield texts[start:]


def _activation(body: PooledBody, classifier: ClassifierConfig) -> ClassActivation:
    if isinstance(body, PairBody | ClassifyBody) and not body.use_activation:
        return "none"
    return classifier.pair_activation if isinstance(body, PairBody) else classifier.activation


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What `call` returns, or raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
        return error
