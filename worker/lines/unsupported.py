"""Parameters of OpenAI's and vLLM's that are known here and not carried out."""

from __future__ import annotations

from collections.abc import Mapping

from worker.lines.endpoint import Endpoint
from worker.lines.refusal_error import RefusalError
from worker.lines.shorten import shorten

# Parameter -> the values that ask for nothing. Those are accepted; any other is refused by name, since a result that
# ignored it would not be what the line asked for.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    # Tools are carried out for conversations; their forms of 2023 would need answers of 2023.
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "verbosity": ("medium",),
}
_REFUSED = frozenset(
    {
        "stream_options", "reasoning_effort",
        "audio", "web_search_options", "guided_decoding_backend", "guided_whitespace_pattern",
        "use_beam_search", "length_penalty", "early_stopping", "prompt_logprobs",
        "truncate_prompt_tokens", "chat_template", "add_generation_prompt", "continue_final_message",
        "add_special_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "bad_words", "allowed_token_ids", "logits_processors",
        "prompt_embeds", "documents",
    }
)  # fmt: skip
_KNOWN = _REFUSED | _NEUTRAL.keys()
# What only one endpoint has: to the others the first are unknown, and chats judge the second themselves.
_OF_COMPLETIONS = frozenset({"best_of", "suffix"})
_OF_CHAT = frozenset({"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"})


def without_neutral(body: Mapping[str, object], endpoint: Endpoint) -> Mapping[str, object]:
    """`body` less the parameters that are present but ask for nothing. Raises RefusalError for others."""
    if _KNOWN.isdisjoint(body):  # nearly every line
        return body
    kept: dict[str, object] = {}
    left_to_body = _OF_CHAT if endpoint is Endpoint.CHAT_COMPLETIONS else frozenset[str]()
    if endpoint is not Endpoint.COMPLETIONS:
        left_to_body |= _OF_COMPLETIONS
    for name, value in body.items():
        if name not in _KNOWN or name in left_to_body:
            kept[name] = value
        elif value is not None and not _is_neutral(name, value):
            accepted = " or ".join(map(shorten, _NEUTRAL[name])) if name in _NEUTRAL else "a line without it"
            raise RefusalError(
                f"{name} is {shorten(value)}, which is not supported; accepted: {accepted}",
                code="unsupported_parameter",
                param=name,
            )
    return kept


def _is_neutral(name: str, value: object) -> bool:
    # 0 is not false, 1 is not true
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))
