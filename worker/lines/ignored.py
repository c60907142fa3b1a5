"""Leaves parameters out of bodies whose value asks for nothing, and refuses those that are not carried out."""

from __future__ import annotations

from collections.abc import Mapping

from worker.lines.errors import RefusalError
from worker.lines.request_line import Endpoint
from worker.lines.strict_json import shorten

ENVELOPE_MARKS = frozenset({"method", "url", "body"})  # a line with one of these is an envelope, else a body alone

# Parameter -> the values that ask for nothing, which are accepted. Any other is refused by name, since a result that
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
    # vLLM's, with what it does where a line leaves them out.
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
}
_REFUSED = frozenset(
    {
        "stream_options", "reasoning_effort",
        "audio", "web_search_options", "guided_decoding_backend", "guided_whitespace_pattern",
        "prompt_logprobs", "truncate_prompt_tokens", "chat_template", "add_special_tokens", "allowed_token_ids",
        "prompt_embeds", "documents",
    }
)  # fmt: skip
_KNOWN = _REFUSED | _NEUTRAL.keys()
# Parameters of one endpoint: the others do not know the first, and ChatBody checks the second itself.
_OF_COMPLETIONS = frozenset({"best_of", "suffix"})
_OF_CHAT = frozenset({"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"})


def without_neutral(body: Mapping[str, object], endpoint: Endpoint) -> tuple[Mapping[str, object], list[RefusalError]]:
    """`body` less the parameters that are known and not carried out, and the faults of those that ask for something."""
    if _KNOWN.isdisjoint(body):  # nearly every line
        return body, []
    kept: dict[str, object] = {}
    faults: list[RefusalError] = []
    left_to_body = _OF_CHAT if endpoint is Endpoint.CHAT_COMPLETIONS else frozenset[str]()
    if endpoint is not Endpoint.COMPLETIONS:
        left_to_body |= _OF_COMPLETIONS
    for name, value in body.items():
        if name not in _KNOWN or name in left_to_body:
            kept[name] = value
        elif value is not None and not _is_neutral(name, value):
            faults.append(_unsupported(name, value))
    return kept, faults


def _is_neutral(name: str, value: object) -> bool:
    return any(_is_same(value, neutral) for neutral in _NEUTRAL.get(name, ()))


def _is_same(value: object, neutral: object) -> bool:
    # 0 is not false, 1 is not true; but 1 is 1.0 where a number with a fraction may stand.
    same_type = type(value) is type(neutral) or (type(value) is int and type(neutral) is float)
    return same_type and value == neutral


def _unsupported(name: str, value: object) -> RefusalError:
    accepted = " or ".join(map(shorten, _NEUTRAL[name])) if name in _NEUTRAL else "a line without it"
    message = f"{name} is {shorten(value)}, which is not supported; accepted: {accepted}"
    return RefusalError(message, code="unsupported_parameter", param=name)
