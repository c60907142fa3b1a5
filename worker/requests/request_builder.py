"""A request line to what the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from engine.any_request import AnyRequest
from engine.errors import InvalidRequest, PromptTooLong
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from engine.text.tokenizer import Tokenizer
from worker.answers.answer_formats import AnswerFormats
from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import DEFAULT_MAX_TOKENS, CompletionBody
from worker.lines.embedding_body import EmbeddingBody
from worker.lines.endpoint import Endpoint
from worker.lines.names_model import names_model
from worker.lines.request_line import GeneratingBody, RequestLine
from worker.requests.answer_reader import AnswerReader
from worker.requests.call_grammar import CallGrammar
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.embedding_builder import EmbeddingBuilder
from worker.requests.prompt_echoes import PromptEchoes

P = ParamSpec("P")
T = TypeVar("T")


class RequestBuilder:
    """Chat template, tokenisation and sampling parameters, for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        model_name: str,
        formats: AnswerFormats | None = None,
        generates: bool = True,
    ) -> None:
        """`formats`: how the model writes calls and reasoning; None: as its chat template shows.

        `generates`: whether it continues prompts; every model makes embeddings.
        """
        self._tokenizer = tokenizer
        self._embeddings = EmbeddingBuilder(tokenizer, max_model_len=max_model_len)
        self._generates = generates
        self._chat_prompts = ChatPrompts(tokenizer.chat_template, formats or AnswerFormats())
        self.answers = AnswerReader(tokenizer, self._chat_prompts)
        self.echoes = PromptEchoes(tokenizer)
        self._call_grammar = CallGrammar(self._chat_prompts.formats, self.answers.special_marks)
        self._max_model_len = max_model_len  # tokens one request may have, prompt and output together
        self._model_name = model_name

    def build(self, line: RequestLine, request_id: str, *, tenant: str = "") -> AnyRequest:
        """The engine's request for `line`.

        Raises InvalidRequest for what only the model can judge: another model's name, an endpoint it cannot serve, no
        chat template, a conversation its template refuses, a prompt longer than the context. Token ids are the
        engine's to check.
        """
        body = line.body
        if isinstance(body, EmbeddingBody):
            self._check_model(body.model)
            return self._embeddings.build(body, request_id, tenant)
        return self._request(body, self._encode(body, self._prompt(body)), request_id, tenant)

    def build_all(self, lines: Sequence[tuple[RequestLine, str]], *, tenant: str = "") -> list[AnyRequest | Exception]:
        """`build` for each (line, request id), with what it would raise in the place of the request.

        Texts are tokenised together: a third of the time, and other threads run meanwhile.
        """
        built: dict[int, AnyRequest | Exception] = {}
        generating: dict[int, tuple[GeneratingBody, str]] = {}
        embedding: dict[int, tuple[EmbeddingBody, str]] = {}
        for position, (line, request_id) in enumerate(lines):
            if not isinstance(line.body, EmbeddingBody):
                generating[position] = (line.body, request_id)
            elif isinstance(refusal := _outcome(self._check_model, line.body.model), Exception):
                built[position] = refusal
            else:
                embedding[position] = (line.body, request_id)
        built |= zip(generating, self._build_generating(list(generating.values()), tenant), strict=True)
        built |= zip(embedding, self._embeddings.build_all(list(embedding.values()), tenant), strict=True)
        return [built[position] for position in range(len(lines))]

    def _build_generating(self, bodies: Sequence[tuple[GeneratingBody, str]], tenant: str) -> list[Request | Exception]:
        prompts = [_outcome(self._prompt, body) for body, _ in bodies]
        token_ids = self._encode_all([body for body, _ in bodies], prompts)
        return [
            ids if isinstance(ids, Exception) else _outcome(self._request, body, ids, request_id, tenant)
            for (body, request_id), ids in zip(bodies, token_ids, strict=True)
        ]

    def _prompt(self, body: GeneratingBody) -> str | list[int]:
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
            return self._chat_prompts.text(body)
        return body.prompt if isinstance(body.prompt, str) else list(body.prompt)

    def _encode(self, body: GeneratingBody, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._tokenizer.encode(prompt, add_special_tokens=_takes_special_tokens(body))

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
            try:
                ids = self._tokenizer.encode_batch(list(texts.values()), add_special_tokens=add_special_tokens)
            except Exception:  # a seam: one text is at fault, or several; each on its own shows which
                for position, text in texts.items():
                    encoded[position] = _outcome(self._encode, bodies[position], text)
            else:
                for position, token_ids in zip(texts, ids, strict=True):
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
            return self._call_grammar.of(body, opened=self._chat_prompts.opens_reasoning(body))
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


def _outcome(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What `call` returns, or raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
        return error


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
