"""Builds what the engine runs from request lines, and encodes the prompts of many lines together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import AnyRequest, EmbeddingRequest, Request
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from engine.text.tokenizer import Tokenizer
from worker.lines.bodies import DEFAULT_MAX_TOKENS, CompletionBody, EmbeddingBody
from worker.lines.chat import ChatBody
from worker.lines.request_line import ANY_MODEL, Endpoint, GeneratingBody, RequestBody, RequestLine, names_model
from worker.requests.call_grammar import CallGrammar
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.step_engine import StepEngine

P = ParamSpec("P")
T = TypeVar("T")


class RequestBuilder:
    """Builds requests for one model: chat template, tokenisation, sampling parameters."""

    def __init__(
        self, engine: StepEngine, prompts: ChatPrompts, grammars: CallGrammar, *, names: Sequence[str]
    ) -> None:
        """`names`: those that lines may give, the model's own first; `*`: any."""
        self._tokenizer = engine.tokenizer
        self._generates = engine.generates
        self._chat_prompts = prompts
        self._call_grammar = grammars
        self._max_model_len = engine.max_model_len  # tokens one request may have, prompt and output together
        self._names = names

    def build_all(
        self,
        lines: Sequence[tuple[RequestLine, str]],
        *,
        created_s: int,
        tenant: str = "",
        priority: int = 0,
        is_resolved: bool = False,
    ) -> list[AnyRequest | Exception]:
        """The engine's request for each (line, request id), or what is wrong with the line.

        An InvalidRequest is what only the model can judge: another model's name, an endpoint it cannot serve, no chat
        template, a conversation its template refuses, a prompt longer than the context. Another exception is our own
        fault. Token ids are the engine's to check. Texts are tokenised together. `created_s`: see ChatPrompts.text.
        `priority`: the engine's, lower runs first.
        `is_resolved`: the lines mean this model, whatever they name.
        """
        bodies = [line.body for line, _ in lines]
        found = [attempt(self._inputs, body, created_s, is_resolved) for body in bodies]
        inputs = self._encode_all(bodies, found)
        return [
            given
            if isinstance(given, Exception)
            else attempt(self._request, line.body, given, request_id, tenant, priority)
            for (line, request_id), given in zip(lines, inputs, strict=True)
        ]

    def _inputs(self, body: RequestBody, created_s: int, is_resolved: bool) -> Sequence[str | Sequence[int]]:
        """The prompt, or the inputs of an embedding line: text to tokenise, or the token ids that the line gives."""
        if not is_resolved:
            self._check_model(body.model)
        if isinstance(body, EmbeddingBody):
            return body.input
        if not self._generates:
            raise InvalidRequest(
                f"this model makes embeddings only; accepted: url {Endpoint.EMBEDDINGS}",
                param="url",
                code="unsupported_endpoint",
            )
        return [self._chat_prompts.text(body, created_s) if isinstance(body, ChatBody) else body.prompt]

    def _encode_all(
        self, bodies: Sequence[RequestBody], inputs: Sequence[Sequence[str | Sequence[int]] | Exception]
    ) -> list[list[Sequence[int] | Exception] | Exception]:
        """`inputs`, in which each text became its token ids, or what encoding it raised."""
        texts: dict[bool, list[str]] = {True: [], False: []}  # with special tokens, and without
        for body, given in zip(bodies, inputs, strict=True):
            if not isinstance(given, Exception):
                texts[_takes_special_tokens(body)] += [item for item in given if isinstance(item, str)]
        encoded = {
            special: iter(encode_each(self._tokenizer, found, add_special_tokens=special))
            for special, found in texts.items()
        }
        return [
            given
            if isinstance(given, Exception)
            else [next(encoded[_takes_special_tokens(body)]) if isinstance(item, str) else item for item in given]
            for body, given in zip(bodies, inputs, strict=True)
        ]

    def _request(
        self,
        body: RequestBody,
        inputs: Sequence[Sequence[int] | Exception],
        request_id: str,
        tenant: str,
        priority: int,
    ) -> AnyRequest:
        if isinstance(body, EmbeddingBody):
            checked = [self._checked_input(ids, body.param_of(index)) for index, ids in enumerate(inputs)]
            return EmbeddingRequest(request_id, checked, body.dimensions, priority, tenant)
        (token_ids,) = inputs
        if isinstance(token_ids, Exception):
            raise token_ids
        max_tokens = body.max_output_tokens
        self._check_fits(len(token_ids) + (max_tokens != 0), "messages" if isinstance(body, ChatBody) else "prompt")
        if max_tokens is None and not isinstance(body, ChatBody):
            max_tokens = min(DEFAULT_MAX_TOKENS, self._max_model_len - len(token_ids))
        params = _sampling_params(body, max_tokens, self._grammar(body))
        return Request(request_id, list(token_ids), params, priority, tenant)

    def _checked_input(self, token_ids: Sequence[int] | Exception, param: str) -> Sequence[int]:
        if isinstance(token_ids, Exception):
            raise token_ids
        if not token_ids:  # a text of which the tokeniser makes nothing
            raise InvalidRequest(f"{param} has no tokens", param=param, code="empty_prompt")
        self._check_fits(len(token_ids), param)
        return token_ids

    def _grammar(self, body: GeneratingBody) -> Grammar | None:
        if isinstance(body, ChatBody):
            return self._call_grammar.of(body)
        given = body.grammar
        return None if given is None else Grammar(given.kind, given.text, given.param)

    def _check_model(self, name: str | None) -> None:
        if name is not None and ANY_MODEL not in self._names and not any(names_model(name, own) for own in self._names):
            accepted = ", ".join(map(repr, self._names))
            raise InvalidRequest(
                f"model is {name!r}; accepted: {accepted}, or leave it out (model.name and model.aliases set names)",
                param="model",
                code="model_not_found",
            )

    def _check_fits(self, num_tokens: int, param: str) -> None:
        """Raises PromptTooLong naming `param`: what can never run must not wait at full size until it is its turn."""
        if num_tokens > self._max_model_len:
            raise PromptTooLong(num_tokens, self._max_model_len, param=param)


def _takes_special_tokens(body: RequestBody) -> bool:
    return not isinstance(body, ChatBody)  # a chat template writes them itself


def _sampling_params(body: GeneratingBody, max_tokens: int | None, grammar: Grammar | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=max(body.top_k, 0),  # -1 is vLLM's spelling of off
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs if isinstance(body, CompletionBody) else None,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        n=body.n,
        grammar=grammar,
    )


def encode_each(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> Sequence[list[int] | Exception]:
    """The token ids of each text, or what encoding it raises.

    All together: a third of the time that one after the other takes, and other threads run meanwhile.
    """
    try:
        return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    except Exception:  # a seam: one text is at fault, or several; each on its own shows which
        return [attempt(tokenizer.encode, text, add_special_tokens=add_special_tokens) for text in texts]


def attempt(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What `call` returns, or raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
        return error
