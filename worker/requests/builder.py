"""Builds what the engine runs from request lines, and encodes the prompts of many lines together."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import AnyRequest, Request
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from engine.text.tokenizer import Tokenizer
from worker.lines.bodies import DEFAULT_MAX_TOKENS, CompletionBody, PooledBody
from worker.lines.chat import ChatBody
from worker.lines.grammar import GivenGrammar
from worker.lines.request_line import ANY_MODEL, GeneratingBody, RequestLine, names_model
from worker.lines.scoring import PairBody
from worker.requests.call_grammar import CallGrammar
from worker.requests.chat_prompts import ChatPrompts
from worker.requests.pooled import PooledRequestBuilder, attempt
from worker.requests.step_engine import StepEngine, served_endpoints

_LINE = "\n"  # a text that all tokenizers keep


class RequestBuilder:
    """Builds requests for one model: chat template, tokenisation, sampling parameters."""

    def __init__(
        self, engine: StepEngine, prompts: ChatPrompts, grammars: CallGrammar, *, names: Sequence[str]
    ) -> None:
        """`names`: those that lines may give, the model's own first; `*`: any."""
        self._tokenizer = engine.tokenizer
        self._endpoints = served_endpoints(
            generates=engine.generates, compares=engine.makes_comparable_embeddings, classifier=engine.classifier
        )
        self._num_classes = 0 if engine.classifier is None else len(engine.classifier.labels)
        self._pooled = PooledRequestBuilder(engine)
        self._chat_prompts = prompts
        self._call_grammar = grammars
        self._max_model_len = engine.max_model_len  # tokens one request may have, prompt and output together
        self._last_choices: tuple[GivenGrammar | None, Sequence[Sequence[int]]] = (None, ())
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
        faults = [attempt(self._check, line, is_resolved) for line, _ in lines]
        good = [each for each, fault in zip(lines, faults, strict=True) if fault is None]
        pooled = iter(
            self._pooled.build_all(
                [(line.body, request_id) for line, request_id in good if isinstance(line.body, PooledBody)],
                tenant=tenant,
                priority=priority,
            )
        )
        generating = iter(
            self._build_generating(
                [(line.body, request_id) for line, request_id in good if not isinstance(line.body, PooledBody)],
                created_s=created_s,
                tenant=tenant,
                priority=priority,
            )
        )
        return [
            fault if fault is not None else next(pooled if isinstance(line.body, PooledBody) else generating)
            for (line, _), fault in zip(lines, faults, strict=True)
        ]

    def _check(self, line: RequestLine, is_resolved: bool) -> None:
        """Raise InvalidRequest for another model's name, and for an endpoint that this one does not serve."""
        if not is_resolved:
            self._check_model(line.body.model)
        if line.endpoint in self._endpoints:
            return
        why = ""
        if isinstance(line.body, PairBody):
            why = f", since a score needs one class, and it has {self._num_classes}"
        raise InvalidRequest(
            f"this model does not serve {line.endpoint}{why}; accepted: url {' or '.join(self._endpoints)}",
            param="url",
            code="unsupported_endpoint",
        )

    def _build_generating(
        self, lines: Sequence[tuple[GeneratingBody, str]], *, created_s: int, tenant: str, priority: int
    ) -> list[Request | Exception]:
        prompts = [attempt(self._prompt, body, created_s) for body, _ in lines]
        encoded = self._encode_all([body for body, _ in lines], prompts)
        return [
            token_ids
            if isinstance(token_ids, Exception)
            else attempt(self._request, body, token_ids, request_id, tenant, priority)
            for (body, request_id), token_ids in zip(lines, encoded, strict=True)
        ]

    def _prompt(self, body: GeneratingBody, created_s: int) -> str | Sequence[int]:
        """The prompt: text to tokenise, or the token ids that the line gives."""
        return self._chat_prompts.text(body, created_s) if isinstance(body, ChatBody) else body.prompt

    def _encode_all(
        self, bodies: Sequence[GeneratingBody], prompts: Sequence[str | Sequence[int] | Exception]
    ) -> list[Sequence[int] | Exception]:
        """`prompts`, in which each text became its token ids, or what encoding it raised."""
        texts: dict[bool, list[str]] = {True: [], False: []}  # with special tokens, and without
        for body, prompt in zip(bodies, prompts, strict=True):
            if isinstance(prompt, str):
                texts[_takes_special_tokens(body)].append(prompt)
        encoded = {special: iter(self._encode_each(found, special)) for special, found in texts.items()}
        return [
            next(encoded[_takes_special_tokens(body)]) if isinstance(prompt, str) else prompt
            for body, prompt in zip(bodies, prompts, strict=True)
        ]

    def _encode_each(self, texts: Sequence[str], add_special_tokens: bool) -> Sequence[list[int] | Exception]:
        """The token ids of each text, or what encoding it raises.

        All together: a third of the time that one after the other takes, and other threads run meanwhile.
        """
        encode, options = self._tokenizer.encode, {"add_special_tokens": add_special_tokens}
        try:
            return self._tokenizer.encode_batch(texts, **options)
        except Exception:  # a seam: one text is at fault, or several; each on its own shows which
            return [attempt(encode, text, **options) for text in texts]

    def _request(
        self, body: GeneratingBody, token_ids: Sequence[int], request_id: str, tenant: str, priority: int
    ) -> Request:
        max_tokens = body.max_output_tokens
        self._check_fits(len(token_ids) + (max_tokens != 0), "messages" if isinstance(body, ChatBody) else "prompt")
        if max_tokens is None and not isinstance(body, ChatBody):
            max_tokens = min(DEFAULT_MAX_TOKENS, self._max_model_len - len(token_ids))
        params = _sampling_params(body, max_tokens, self._grammar(body))
        continuations = self._choices(body, len(token_ids)) if body.choice_logprobs else ()
        goes_on = isinstance(body, CompletionBody)
        return Request(
            request_id, list(token_ids), params, priority, tenant, continuations=continuations, goes_on=goes_on
        )

    def _choices(self, body: GeneratingBody, num_prompt_tokens: int) -> Sequence[Sequence[int]]:
        """The tokens of each choice that is scored. Raises InvalidRequest where no answer can begin with one."""
        if isinstance(body, ChatBody) and self._chat_prompts.reasons_first(body):
            raise InvalidRequest(
                "choice_logprobs is true, but this model reasons before it answers; accepted: false, or a line that "
                "switches reasoning off, where the chat template can",
                param="choice_logprobs",
            )
        given, (last, choices) = body.grammar, self._last_choices
        if given is None or last != given:  # the lines of a job have the same
            choices = [_encode_exactly(self._tokenizer, choice) for choice in body.scored_choices]
            self._last_choices = (given, choices)
        self._check_fits(num_prompt_tokens + max(map(len, choices)), "choice_logprobs")
        return choices

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


def _encode_exactly(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens that are `text` behind any other text: without the space that some tokenizers put before a text's first
    word. Raises InvalidRequest if there are none.
    """
    before = tokenizer.encode(_LINE, add_special_tokens=False)
    for context in ([], before):
        token_ids = tokenizer.encode(_LINE * bool(context) + text, add_special_tokens=False)
        found = token_ids[len(context) :]
        written = b"".join(map(tokenizer.token_bytes, found))
        if token_ids[: len(context)] == context and written == text.encode("utf-8"):
            return found
    raise InvalidRequest(
        f"choice_logprobs cannot be told for {text!r}, which this model's tokenizer does not write as it is; accepted: "
        "other choices, or false",
        param="choice_logprobs",
    )


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
        allowed_token_ids=body.allowed_token_ids,
        ignore_eos=body.ignore_eos,
        n=body.n,
        grammar=grammar,
    )
