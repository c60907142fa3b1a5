"""A request line that can be run."""

from __future__ import annotations

import json
from dataclasses import dataclass

from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import CompletionBody
from worker.lines.endpoint import Endpoint

RequestBody = CompletionBody | ChatBody


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line of a job, checked as far as that is possible without the model."""

    index: int  # 0-based position in the job
    custom_id: str
    endpoint: Endpoint
    body: RequestBody

    def prompt_key(self) -> str:
        """Text whose order is prompt order: two prompts with a long common beginning sort next to each other.

        It stands in for the token prefix where no tokeniser is at hand. Keys of token prompts, text prompts
        and conversations begin with different characters. Tools follow the system message, as in templates.
        """
        if isinstance(self.body, CompletionBody):
            if isinstance(self.body.prompt, str):
                return f"t{self.body.prompt}"
            # Fixed width keeps numeric order; ids beyond 32 bits are refused later, wherever they sort.
            return "i" + "".join(f"{token_id:08x}" for token_id in self.body.prompt)
        messages = [f"{message.role}\x1f{message.text}\x1e" for message in self.body.messages]
        if self.body.tools:
            tools = json.dumps([tool.as_given() for tool in self.body.tools])
            starts_with_system = self.body.messages[0].role in ("system", "developer")
            messages.insert(1 if starts_with_system else 0, f"{tools}\x1e")
        return "m" + "".join(messages)
