"""Takes a finished answer apart into reasoning, tool calls and text, in the formats that model families write."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from settings import ReasoningFormat, ToolCallFormat
from worker.records.harmony import CHANNEL, HARMONY_MARKS
from worker.records.tool_calls import MARKS, CalledTool, shown_format

REASONING_BEGIN, REASONING_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of one model.

    tool_calls, each call being a JSON object of `name` and `arguments` unless said otherwise:

    - qwen3: between `<tool_call>` and `</tool_call>`, also known as Hermes; SmolLM3 and Granite 4 have it too;
    - qwen3_coder: between the same marks `<function=name>` with a `<parameter=key>` for each argument;
    - llama3: an answer that is such objects (`name`, `parameters`), also behind `<|python_tag|>`;
    - pythonic: an answer that is a list of Python's calls, `[name(key="value")]`, as Llama 3.2 is asked for by prompt;
      olmo3: a line for each, between `<function_calls>` and `</function_calls>`;
    - mistral: a list of them behind `[TOOL_CALLS]`; mistral_v11: behind that a name, `[ARGS]` and the arguments;
    - granite: a list of them behind `<|tool_call|>`, of Granite 3;
    - harmony: messages to a function, in channels, of gpt-oss;
    - none leaves calls in the text.

    reasoning: qwen3 is `<think>` ... `</think>` before the answer, harmony the channel `analysis`.
    """

    tool_calls: ToolCallFormat = "auto"
    reasoning: ReasoningFormat = "auto"

    def for_template(self, writes: Callable[[str], bool]) -> AnswerFormats:
        """With `auto` replaced by what the model's chat template writes itself; `writes` says whether it has a text.

        tool_calls stays `auto` where the template shows no format that is known here.
        """
        shown: ToolCallFormat = "harmony" if writes(CHANNEL) else shown_format(writes)
        tool_calls = shown if self.tool_calls == "auto" else self.tool_calls
        reasoning = self.reasoning
        if reasoning == "auto":
            reasoning = "harmony" if writes(CHANNEL) else "qwen3" if writes(REASONING_END) else "none"
        return AnswerFormats(tool_calls, reasoning)

    @property
    def marks(self) -> frozenset[str]:
        """The texts by which parts are told apart. Some tokenizers have special tokens for them."""
        if self.is_harmony:
            return HARMONY_MARKS
        calls = MARKS.get(self.tool_calls, frozenset())
        return calls | ({REASONING_BEGIN, REASONING_END} if self.reasoning == "qwen3" else set())

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages in channels."""
        return "harmony" in (self.tool_calls, self.reasoning)

    @property
    def has_short_ids(self) -> bool:
        """Whether calls need ids of nine letters and digits: Mistral's templates take no others back."""
        return self.tool_calls in ("mistral", "mistral_v11")


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a message holds. An answer without calls and reasoning is its content."""

    content: str | None  # None: nothing but calls
    calls: tuple[CalledTool, ...] = ()
    reasoning: str | None = None  # None: there was none
    num_reasoning_tokens: int | None = None  # its tokens, its marks included; None: this model's are not told apart
    has_short_ids: bool = False  # of calls: see AnswerFormats


def split_reasoning(text: str, *, opened: bool) -> tuple[str, int] | None:
    """The reasoning at the beginning of `text` and where the answer behind it begins; None if there is none.

    `opened`: the prompt ended with `<think>`, so the text begins inside. Reasoning that was not closed, because the
    answer was cut, is all of the text. Line ends around it belong to the format, which writes them again.
    """
    begin = len(text) - len(text.lstrip())
    if text.startswith(REASONING_BEGIN, begin):
        begin += len(REASONING_BEGIN)
    elif opened:
        begin = 0
    else:
        return None
    end = text.find(REASONING_END, begin)
    if end < 0:
        return text[begin:].strip("\n"), len(text)
    return text[begin:end].strip("\n"), end + len(REASONING_END)


def call_id(place: str, *, is_short: bool) -> str:
    """The id of a call, which follows from where it stands, so it is always the same."""
    # A digest. Ids go back into conversations, where OpenAI takes up to 40 characters and Mistral's templates nine.
    digest = hashlib.blake2b(place.encode("utf-8"), digest_size=12).hexdigest()
    return digest[:9] if is_short else f"call_{digest}"
