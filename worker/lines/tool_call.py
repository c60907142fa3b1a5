"""A tool call, inside an assistant message."""

from __future__ import annotations

from typing import Literal

from worker.lines.called_function import CalledFunction
from worker.lines.given_model import GivenModel


class ToolCall(GivenModel):
    """One call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, object]:
        """The call as chat templates take it: arguments as an object, as vLLM passes them."""
        function = {**self.function.as_given(), "arguments": self.function.arguments}
        return {**self.as_given(), "function": function}
