"""Reads answers in the harmony format, which gpt-oss writes: messages in channels, each with a header.

https://github.com/openai/harmony describes it. A prompt ends with `<|start|>assistant`, and an answer goes on:
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from worker.records.tool_calls import CalledTool, arguments_text, whole_value

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKS = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN})
REASONING_CHANNEL, CALL_CHANNEL, ANSWER_CHANNEL = "analysis", "commentary", "final"

_MESSAGE = re.compile(
    r"(?P<header>[^<]*(?:<\|(?:start|channel|constrain)\|>[^<]*)*)<\|message\|>(?P<content>.*?)"
    r"(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([A-Za-z0-9_-]+)")
_HEADER_ALONE = re.compile(r"\s*(?:<\|(?:start|channel|constrain)\|>[^<]*)+")
_BETWEEN = "\n\n"  # of two messages of one kind


@dataclass(frozen=True, slots=True)
class ChannelAnswer:
    """What the messages of an answer hold."""

    content: str  # of `final`, and of messages to nobody in `commentary`
    reasoning: str | None  # of `analysis`; None: there was none
    calls: tuple[CalledTool, ...]
    reasoning_end: int  # characters up to where the reasoning before all else ends


def read_channels(text: str, names: Collection[str]) -> ChannelAnswer | None:
    """The messages of `text`; None where it has none. names: functions that may be called.

    Calls are read all or none: where one cannot be, what the messages hold is content. An answer that was cut within a
    header ends before it. Never raises.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[CalledTool | None] = []
    unread: list[str] = []
    position = reasoning_end = 0
    while (message := _MESSAGE.match(text, position)) is not None and position < len(text):
        header, held, position = message["header"], message["content"], message.end()
        channel = _NAME_OF_CHANNEL.search(header)
        recipient = _RECIPIENT.search(header.replace(CHANNEL, " "))
        if recipient is not None:
            calls.append(_call(recipient[1], held, names))
            unread.append(held)
        elif channel is not None and channel[1] == REASONING_CHANNEL:
            reasoning.append(held)
            if not content and not calls:
                reasoning_end = position
        else:
            content.append(held)
    if position == 0:
        return None
    rest = text[position:]
    if rest.strip() and _HEADER_ALONE.fullmatch(rest) is None:
        content.append(rest)
    found = tuple(call for call in calls if call is not None)
    if len(found) < len(calls):
        content, found = [*content, *unread], ()
    shown = _BETWEEN.join(part for part in content if part)
    return ChannelAnswer(shown, _BETWEEN.join(reasoning) if reasoning else None, found, reasoning_end)


def _call(name: str, held: str, names: Collection[str]) -> CalledTool | None:
    arguments = arguments_text(whole_value(held), held.strip()) if name in names else None
    return None if arguments is None else CalledTool(name, arguments)
