"""Leaves parameters out of bodies: those whose value asks for nothing, and those that `--ignore-param` names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from settings import LimitSettings
from worker.lines.errors import NotIgnorable, RefusalError
from worker.lines.request_line import PROMPT_KEYS, SECOND_KEYS, Endpoint
from worker.lines.strict_json import read_strict_json, shorten

ENVELOPE_MARKS = frozenset({"method", "url", "body"})  # a line with one of these is an envelope, else a body alone

# Parameter -> the values that ask for nothing, which are accepted. Any other is refused by name, since a result that
# ignored it would not be what the line asked for.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "background": (False,),
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
        "prompt_logprobs", "truncate_prompt_tokens", "chat_template", "add_special_tokens",
        "prompt_embeds", "documents",
    }
)  # fmt: skip
_KNOWN = _REFUSED | _NEUTRAL.keys()
# Left to the bodies: what they check themselves, and, but for completions, what is a parameter of these alone.
_OF_COMPLETIONS = frozenset({"best_of", "suffix"})
_OF_CHAT = _OF_COMPLETIONS | {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
_OF_POOLED = _OF_COMPLETIONS | {"truncate_prompt_tokens"}
_OF_PAIRS = _OF_POOLED | {"documents"}
_LEFT_TO_BODY: Mapping[Endpoint, frozenset[str]] = {
    Endpoint.CHAT_COMPLETIONS: _OF_CHAT,
    Endpoint.COMPLETIONS: frozenset(),
    Endpoint.RESPONSES: _OF_CHAT - {"reasoning_effort"},
    Endpoint.EMBEDDINGS: _OF_POOLED,
    Endpoint.SCORE: _OF_PAIRS,
    Endpoint.RERANK: _OF_PAIRS,
    Endpoint.CLASSIFY: _OF_POOLED,
}

# What makes a line a request: without one of these it would be another one, or none.
_NEEDED = (*PROMPT_KEYS, *SECOND_KEYS, "custom_id", *sorted(ENVELOPE_MARKS))


def without_neutral(body: Mapping[str, object], endpoint: Endpoint) -> tuple[Mapping[str, object], list[RefusalError]]:
    """`body` less the parameters that are known and not carried out, and the faults of those that ask for something."""
    if _KNOWN.isdisjoint(body):  # nearly every line
        return body, []
    kept: dict[str, object] = {}
    faults: list[RefusalError] = []
    left_to_body = _LEFT_TO_BODY[endpoint]
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


class IgnoredParams:
    """Takes parameters that a user calls harmless out of lines before they are read, and counts those lines."""

    def __init__(self, names: Iterable[str], limits: LimitSettings) -> None:
        """Raises NotIgnorable for a name without which a line would be another request."""
        self._limits = limits
        self._counts = dict.fromkeys(names, 0)
        for name in self._counts:
            if not name or name in _NEEDED:
                raise NotIgnorable(name, accepted=f"a parameter of the body, none of {', '.join(_NEEDED)}")
        self._marks = [json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass") for name in self._counts]

    @property
    def counts(self) -> dict[str, int]:
        """Each name, with the lines so far that had it."""
        return dict(self._counts)

    @property
    def text(self) -> str:
        """The counts in words; empty where no name was given."""
        parts = [f"{name} in {count} line{'' if count == 1 else 's'}" for name, count in self._counts.items()]
        return f"ignored {', '.join(parts)}" if parts else ""

    def strip(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """The lines without these parameters; one that has none of them, or that is refused anyway, as it is."""
        return map(self._strip, lines) if self._counts else iter(lines)

    def _strip(self, raw: bytes) -> bytes:
        # A name may be written with escapes: "best\u005fof".
        if len(raw) > self._limits.max_prompt_bytes or not any(mark in raw for mark in (*self._marks, b"\\u")):
            return raw
        try:
            parsed = read_strict_json(raw, self._limits.max_json_depth)
            parsed.check()
        except RefusalError:
            return raw  # its record says what is wrong with it
        line = parsed.value
        body = line if not isinstance(line, dict) or ENVELOPE_MARKS.isdisjoint(line) else line.get("body")
        found = [name for name in self._counts if name in body] if isinstance(body, dict) else []
        if not isinstance(body, dict) or not found:
            return raw
        for name in found:
            del body[name]
            self._counts[name] += 1
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
