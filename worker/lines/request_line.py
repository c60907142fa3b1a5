"""A request line that can be run."""

from __future__ import annotations

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
        and conversations begin with different characters.
        """
        if isinstance(self.body, CompletionBody):
            if isinstance(self.body.prompt, str):
                return f"t{self.body.prompt}"
            # Fixed width keeps numeric order; ids have 31 bits.
            return "i" + "".join(f"{token_id:08x}" for token_id in self.body.prompt)
        messages = [f"{message.role}\x1f{message.text}\x1e" for message in self.body.messages]
        return "m" + "".join(messages)
