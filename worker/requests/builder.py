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
from worker.lines.request_line import Endpoint, GeneratingBody, RequestLine, names_model
from worker.requests.call_grammar import CallGrammar
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.step_engine import StepEngine

P = ParamSpec("P")
T = TypeVar("T")


class RequestBuilder:
    """Chat template, tokenisation and sampling parameters, for one model."""

    def __init__(self, engine: StepEngine, prompts: ChatPrompts, grammars: CallGrammar, *, model_name: str) -> None:
        """`model_name`: the one that lines may give."""
        self._tokenizer = engine.tokenizer
        self._embeddings = EmbeddingBuilder(engine.tokenizer, max_model_len=engine.max_model_len)
        self._generates = engine.generates
        self._chat_prompts = prompts
        self._call_grammar = grammars
        self._max_model_len = engine.max_model_len  # tokens one request may have, prompt and output together
        self._model_name = model_name

    def build_all(
        self, lines: Sequence[tuple[RequestLine, str]], *, created_s: int, tenant: str = ""
    ) -> list[AnyRequest | Exception]:
        """The engine's request for each (line, request id), or what is wrong with the line.

        An InvalidRequest is what only the model can judge: another model's name, an endpoint it cannot serve, no chat
        template, a conversation its template refuses, a prompt longer than the context. Another exception is our own
        fault. Token ids are the engine's to check. Texts are tokenised together. `created_s`: see ChatPrompts.text.
        """
        built: dict[int, AnyRequest | Exception] = {}
        generating: dict[int, tuple[GeneratingBody, str]] = {}
        embedding: dict[int, tuple[EmbeddingBody, str]] = {}
        for position, (line, request_id) in enumerate(lines):
            if not isinstance(line.body, EmbeddingBody):
                generating[position] = (line.body, request_id)
            elif isinstance(refusal := attempt(self._check_model, line.body.model), Exception):
                built[position] = refusal
            else:
                embedding[position] = (line.body, request_id)
        built |= zip(generating, self._build_generating(list(generating.values()), created_s, tenant), strict=True)
        built |= zip(embedding, self._embeddings.build_all(list(embedding.values()), tenant), strict=True)
        return [built[position] for position in range(len(lines))]

    def _build_generating(
        self, bodies: Sequence[tuple[GeneratingBody, str]], created_s: int, tenant: str
    ) -> list[Request | Exception]:
        prompts = [attempt(self._prompt, body, created_s) for body, _ in bodies]
        token_ids = self._encode_all([body for body, _ in bodies], prompts)
        return [
            ids if isinstance(ids, Exception) else attempt(self._request, body, ids, request_id, tenant)
            for (body, request_id), ids in zip(bodies, token_ids, strict=True)
        ]

    def _prompt(self, body: GeneratingBody, created_s: int) -> str | list[int]:
        """What is to be tokenised, or the token ids that the line gives."""
        self._check_model(body.model)
        if not self._generates:
            raise InvalidRequest(
                f"this model makes embeddings only; accepted: url {Endpoint.EMBEDDINGS}",
                param="url",
                accepted=Endpoint.EMBEDDINGS,
                code="unsupported_endpoint",
            )
        if isinstance(body, ChatBody):
            return self._chat_prompts.text(body, created_s)
        return body.prompt if isinstance(body.prompt, str) else list(body.prompt)

    def _encode_all(
        self, bodies: Sequence[GeneratingBody], prompts: Sequence[str | list[int] | Exception]
    ) -> list[list[int] | Exception]:
        encoded: list[list[int] | Exception] = [[] if isinstance(prompt, str) else prompt for prompt in prompts]
        for add_special_tokens in (False, True):
            texts = {
                position: prompt
                for position, (body, prompt) in enumerate(zip(bodies, prompts, strict=True))
                if isinstance(prompt, str) and _takes_special_tokens(body) is add_special_tokens
            }
            found = encode_each(self._tokenizer, list(texts.values()), add_special_tokens=add_special_tokens)
            for position, token_ids in zip(texts, found, strict=True):
                encoded[position] = token_ids
        return encoded

    def _request(self, body: GeneratingBody, token_ids: list[int], request_id: str, tenant: str) -> Request:
        max_tokens = body.max_output_tokens
        self._check_fits(len(token_ids) + (max_tokens != 0), "messages" if isinstance(body, ChatBody) else "prompt")
        if max_tokens is None and not isinstance(body, ChatBody):
            max_tokens = min(DEFAULT_MAX_TOKENS, self._max_model_len - len(token_ids))
        params = _sampling_params(body, max_tokens, self._grammar(body))
        return Request(request_id, token_ids, params, tenant=tenant)

    def _grammar(self, body: GeneratingBody) -> Grammar | None:
        if isinstance(body, ChatBody):
            return self._call_grammar.of(body)
        given = body.grammar
        return None if given is None else Grammar(given.kind, given.text, given.param)

    def _check_model(self, name: str | None) -> None:
        if name is not None and not names_model(name, self._model_name):
            raise InvalidRequest(
                f"model is {name!r}; accepted: {self._model_name!r}, or leave it out (model.name sets the name)",
                param="model",
                value=name,
                accepted=self._model_name,
                code="model_not_found",
            )

    def _check_fits(self, num_tokens: int, param: str) -> None:
        """That a prompt and one token fit: what can never run must not wait at full size until it is its turn.
        Raises PromptTooLong naming `param`.
        """
        if num_tokens > self._max_model_len:
            raise PromptTooLong(num_tokens, self._max_model_len, param=param)


def _takes_special_tokens(body: GeneratingBody) -> bool:
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


def encode_each(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = True
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
