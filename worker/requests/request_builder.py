"""A request line to what the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.chat_template import RESERVED, ChatTemplate
from engine.text.tokenizer import Tokenizer
from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import DEFAULT_MAX_TOKENS, CompletionBody
from worker.lines.request_line import RequestLine

P = ParamSpec("P")
T = TypeVar("T")


class RequestBuilder:
    """Chat template, tokenisation and sampling parameters, for one model."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len  # tokens one request may have, prompt and output together
        self._model_name = model_name

    def build(self, line: RequestLine, request_id: str, *, tenant: str = "") -> Request:
        """The engine's request for `line`.

        Raises InvalidRequest for what only the model can judge: another model's name, no chat template, a
        conversation its template refuses, a prompt longer than the context. Token ids are the engine's to check.
        """
        prompt = self._prompt(line)
        return self._request(line, self._encode(line, prompt), request_id, tenant)

    def build_all(self, lines: Sequence[tuple[RequestLine, str]], *, tenant: str = "") -> list[Request | Exception]:
        """`build` for each (line, request id), with what it would raise in the place of the request.

        Texts are tokenised together: a third of the time, and other threads run meanwhile.
        """
        prompts = [_outcome(self._prompt, line) for line, _ in lines]
        token_ids = self._encode_all([line for line, _ in lines], prompts)
        return [
            ids if isinstance(ids, Exception) else _outcome(self._request, line, ids, request_id, tenant)
            for (line, request_id), ids in zip(lines, token_ids, strict=True)
        ]

    def _prompt(self, line: RequestLine) -> str | list[int]:
        """What is to be tokenised, or the token ids that the line gives."""
        self._check_model(line.body.model)
        if isinstance(line.body, ChatBody):
            return self._chat_text(line.body)
        return line.body.prompt if isinstance(line.body.prompt, str) else list(line.body.prompt)

    def _encode(self, line: RequestLine, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._tokenizer.encode(prompt, add_special_tokens=_takes_special_tokens(line))

    def _encode_all(
        self, lines: Sequence[RequestLine], prompts: Sequence[str | list[int] | Exception]
    ) -> list[list[int] | Exception]:
        encoded: list[list[int] | Exception] = [[] if isinstance(prompt, str) else prompt for prompt in prompts]
        for add_special_tokens in (False, True):
            texts = {
                position: prompt
                for position, (line, prompt) in enumerate(zip(lines, prompts, strict=True))
                if isinstance(prompt, str) and _takes_special_tokens(line) is add_special_tokens
            }
            try:
                ids = self._tokenizer.encode_batch(list(texts.values()), add_special_tokens=add_special_tokens)
            except Exception:  # a seam: one text is at fault, or several; each on its own shows which
                for position, text in texts.items():
                    encoded[position] = _outcome(self._encode, lines[position], text)
            else:
                for position, token_ids in zip(texts, ids, strict=True):
                    encoded[position] = token_ids
        return encoded

    def _request(self, line: RequestLine, token_ids: list[int], request_id: str, tenant: str) -> Request:
        body = line.body
        max_tokens = body.max_output_tokens
        self._check_fits(token_ids, "messages" if isinstance(body, ChatBody) else "prompt")
        if max_tokens is None and not isinstance(body, ChatBody):
            max_tokens = min(DEFAULT_MAX_TOKENS, self._max_model_len - len(token_ids))
        return Request(request_id, token_ids, _sampling_params(body, max_tokens), tenant=tenant)

    def _check_model(self, name: str | None) -> None:
        # A hub name such as Qwen/Qwen3-0.6B also means the directory Qwen3-0.6B.
        if name is not None and self._model_name not in (name, name.rpartition("/")[2]):
            raise InvalidRequest(
                f"model is {name!r}; accepted: {self._model_name!r}, or leave it out (model.name sets the name)",
                param="model",
                value=name,
                accepted=self._model_name,
                code="model_not_found",
            )

    def _chat_text(self, body: ChatBody) -> str:
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                "messages need a chat template, which this model does not have; accepted: a prompt",
                param="messages",
                accepted="prompt",
            )
        _check_template_reads(template, body)
        return template.render(
            [message.for_template() for message in body.messages],
            tools=None,
            add_generation_prompt=True,
            **body.chat_template_kwargs,
        )

    def _check_fits(self, token_ids: Sequence[int], param: str) -> None:
        """That one token fits behind them: what can never run must not wait at full size until it is its turn.
        Raises PromptTooLong naming `param`.
        """
        if len(token_ids) >= self._max_model_len:
            raise PromptTooLong(len(token_ids) + 1, self._max_model_len, param=param)


def _takes_special_tokens(line: RequestLine) -> bool:
    return not isinstance(line.body, ChatBody)  # a chat template writes them itself


def _outcome(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """What `call` returns, or raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # a seam: what a template or tokeniser may raise over one prompt stays with it
        return error


def _check_template_reads(template: ChatTemplate, body: ChatBody) -> None:
    """Raise InvalidRequest for template arguments that the template would ignore."""
    for name, value in body.chat_template_kwargs.items():
        if name in RESERVED or not template.reads(name, with_tools=False):
            why = "the request itself sets" if name in RESERVED else "this model's chat template does not read"
            raise InvalidRequest(
                f"chat_template_kwargs has {name!r}, which {why}; accepted: other names",
                param=f"chat_template_kwargs.{name}",
                value=value,
            )


def _sampling_params(body: CompletionBody | ChatBody, max_tokens: int | None) -> SamplingParams:
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
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        n=body.n,
    )
