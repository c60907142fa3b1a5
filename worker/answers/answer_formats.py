"""How a model writes reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from settings import ReasoningFormat, ToolCallFormat

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
REASONING_BEGIN, REASONING_END = "<think>", "</think>"

# Other models put XML between the same marks; in their templates stands one of these.
_OTHER_CALLS = ("<function=", "<arg_key>")


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of one model.

    tool_calls: qwen3 is one JSON object (`name`, `arguments`) between `<tool_call>` and `</tool_call>` for each call,
    also known as Hermes; llama3 is an answer that is such an object (`name`, `parameters`), also behind
    `<|python_tag|>`; none leaves calls in the text. reasoning: qwen3 is `<think>` ... `</think>` before the answer.
    """

    tool_calls: ToolCallFormat = "auto"
    reasoning: ReasoningFormat = "auto"

    def for_template(self, writes: Callable[[str], bool]) -> AnswerFormats:
        """With `auto` replaced by what the model's chat template writes itself; `writes` says whether it has a text.

        tool_calls stays `auto` where the template shows no format that is known here.
        """
        tool_calls, reasoning = self.tool_calls, self.reasoning
        if tool_calls == "auto":
            if writes(CALL_BEGIN) and not any(map(writes, _OTHER_CALLS)):
                tool_calls = "qwen3"
            elif writes("<|start_header_id|>") and writes('"parameters"'):
                tool_calls = "llama3"
        if reasoning == "auto":
            reasoning = "qwen3" if writes(REASONING_END) else "none"
        return AnswerFormats(tool_calls, reasoning)

    @property
    def marks(self) -> frozenset[str]:
        """The texts by which parts are told apart. Some tokenizers have special tokens for them."""
        calls = {"qwen3": {CALL_BEGIN, CALL_END}, "llama3": {PYTHON_TAG}}.get(self.tool_calls, set())
        return frozenset(calls | ({REASONING_BEGIN, REASONING_END} if self.reasoning == "qwen3" else set()))
