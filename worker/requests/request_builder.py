"""A request line to what the engine runs."""

from __future__ import annotations

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.chat_template import RESERVED, ChatTemplate
from engine.text.tokenizer import Tokenizer
from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import DEFAULT_MAX_TOKENS, CompletionBody
from worker.lines.request_line import RequestLine


class RequestBuilder:
    """Chat template, tokenisation and sampling parameters, for one model."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len  # tokens one request may have, prompt and output together
        self._model_name = model_name

    def build(self, line: RequestLine, request_id: str, *, priority: int = 0, cache_salt: str = "") -> Request:
        """The engine's request for `line`.

        Raises InvalidRequest for what only the model can judge: another model's name, no chat template, a
        conversation its template refuses, a prompt longer than the context. Token ids are the engine's to check.
        """
        body = line.body
        self._check_model(body.model)
        if isinstance(body, ChatBody):
            prompt_token_ids = self._chat_token_ids(body)
            max_tokens = body.max_output_tokens
        else:
            prompt_token_ids = self._prompt_token_ids(body)
            room = self._max_model_len - len(prompt_token_ids)
            asked = body.max_output_tokens
            max_tokens = min(DEFAULT_MAX_TOKENS, room) if asked is None else asked
        return Request(request_id, prompt_token_ids, _sampling_params(body, max_tokens), priority, cache_salt)

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

    def _prompt_token_ids(self, body: CompletionBody) -> list[int]:
        if isinstance(body.prompt, str):
            return self._fitting(self._tokenizer.encode(body.prompt, add_special_tokens=True), "prompt")
        return self._fitting(list(body.prompt), "prompt")

    def _chat_token_ids(self, body: ChatBody) -> list[int]:
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequest(
                "messages need a chat template, which this model does not have; accepted: a prompt",
                param="messages",
                accepted="prompt",
            )
        _check_template_reads(template, body)
        text = template.render(
            [message.for_template() for message in body.messages],
            tools=None,
            add_generation_prompt=True,
            **body.chat_template_kwargs,
        )
        # The template writes the special tokens itself.
        return self._fitting(self._tokenizer.encode(text, add_special_tokens=False), "messages")

    def _fitting(self, token_ids: list[int], param: str) -> list[int]:
        """`token_ids`, if one token fits behind them: what can never run must not wait at full size until it is its
        turn. Raises PromptTooLong naming `param`.
        """
        if len(token_ids) >= self._max_model_len:
            raise PromptTooLong(len(token_ids) + 1, self._max_model_len, param=param)
        return token_ids


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
