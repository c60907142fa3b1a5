"""Refuses requests that can never be served, before they are queued."""

from __future__ import annotations

from collections.abc import Container, Iterable

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.errors import InvalidRequest, PromptTooLong
from engine.request import RESERVED_PREFIX, ClassificationRequest, EmbeddingRequest, PooledRequest, Request

UNSUPPORTED = "unsupported_endpoint"  # the code of what the model is not made for


def check_request(
    request: Request, *, vocab_size: int, capacity: int, is_taken: bool, unknown_ids: Container[int] = ()
) -> None:
    """Raise InvalidRequest for a request that can never be served, with need and capacity if it is too long.

    is_taken: an unfinished request has its id. unknown_ids: those without a token, which are never generated.
    """
    _check_id(request.request_id, is_taken=is_taken)
    if not request.prompt_token_ids:
        raise InvalidRequest(
            "the prompt is empty", param="prompt", value="", accepted="at least one token", code="empty_prompt"
        )
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    _check_ids("logit_bias", request.params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", request.params.stop_token_ids, vocab_size)
    allowed = request.params.allowed_token_ids
    _check_ids("allowed_token_ids", allowed, vocab_size)
    if allowed and all(token_id in unknown_ids for token_id in allowed):
        raise InvalidRequest(
            "allowed_token_ids holds no token of the tokenizer; accepted: at least one",
            param="allowed_token_ids", value=allowed, accepted="at least one token of the tokenizer",
        )  # fmt: skip
    length = len(request.prompt_token_ids)
    least = length + (request.params.max_tokens != 0)  # a prompt that is only scored may fill all of it
    if least > capacity:
        raise PromptTooLong(least, capacity, param="prompt")
    if length + request.params.min_tokens > capacity:
        raise PromptTooLong(length + request.params.min_tokens, capacity, param="min_tokens")
    if request.params.max_tokens is not None and length + request.params.max_tokens > capacity:
        raise PromptTooLong(length + request.params.max_tokens, capacity)
    _check_continuations(request, vocab_size, capacity)


def _check_continuations(request: Request, vocab_size: int, capacity: int) -> None:
    for number, token_ids in enumerate(request.continuations):
        param = f"continuations[{number}]"
        if not token_ids:
            raise InvalidRequest(
                f"{param} is empty; accepted: at least one token", param=param, value=[], accepted="at least one token"
            )
        _check_ids(param, token_ids, vocab_size)
        if request.num_prompt_tokens + len(token_ids) > capacity:
            raise PromptTooLong(request.num_prompt_tokens + len(token_ids), capacity, param=param)


def check_pooled_request(
    request: PooledRequest, *, vocab_size: int, capacity: int, is_taken: bool, config: EmbeddingConfig, has_head: bool
) -> None:
    """The same for embeddings and scores of classes, where each input may be as long as `capacity`.

    has_head: the model has a head of classes, so that it makes no embeddings.
    """
    _check_id(request.request_id, is_taken=is_taken)
    if isinstance(request, EmbeddingRequest) and has_head:
        raise InvalidRequest("this model has a classification head: it makes no embeddings", code=UNSUPPORTED)
    if isinstance(request, ClassificationRequest) and not has_head:
        raise InvalidRequest("this model has no classification head: it tells no classes apart", code=UNSUPPORTED)
    if not request.inputs:
        raise InvalidRequest(
            "there is no input", param="input", value=[], accepted="at least one input", code="empty_prompt"
        )
    if isinstance(request, ClassificationRequest):
        _check_second_starts(request)
    elif request.dimensions is not None and request.dimensions not in config.dimensions:
        raise InvalidRequest(
            f"dimensions is {request.dimensions}; accepted by this model: {config.dimensions_text}",
            param="dimensions", value=request.dimensions, accepted=config.dimensions_text,
        )  # fmt: skip
    for index, token_ids in enumerate(request.inputs):
        param = "input" if len(request.inputs) == 1 else f"input[{index}]"
        if not token_ids:
            raise InvalidRequest(
                "the input is empty", param=param, value="", accepted="at least one token", code="empty_prompt"
            )
        _check_ids(param, token_ids, vocab_size)
        if len(token_ids) > capacity:
            raise PromptTooLong(len(token_ids), capacity, param=param)


def _check_second_starts(request: ClassificationRequest) -> None:
    starts, lengths = request.second_starts, list(map(len, request.inputs))
    is_fitting = len(starts) == len(lengths) and all(0 <= at <= n for at, n in zip(starts, lengths, strict=True))
    if starts and not is_fitting:
        accepted = f"none, or for each input 0 to its length, {lengths}"
        raise InvalidRequest(
            f"second_starts is {list(starts)}; accepted: {accepted}",
            param="second_starts", value=starts, accepted=accepted,
        )  # fmt: skip


def _check_id(request_id: str, *, is_taken: bool) -> None:
    if is_taken or request_id.startswith(RESERVED_PREFIX):
        raise InvalidRequest(
            f"request_id {request_id!r} is taken; accepted: a new id that does not start with {RESERVED_PREFIX!r}",
            param="request_id", value=request_id,
        )  # fmt: skip


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} holds token id {token_id}; accepted: 0 to {vocab_size - 1}",
                param=param, value=token_id, accepted=f"0 to {vocab_size - 1}",
            )  # fmt: skip
