"""A request line that can be run."""

from __future__ import annotations

import json
from dataclasses import dataclass

from worker.lines.chat_body import ChatBody
from worker.lines.completion_body import CompletionBody
from worker.lines.embedding_body import EmbeddingBody
from worker.lines.endpoint import Endpoint

GeneratingBody = CompletionBody | ChatBody
RequestBody = GeneratingBody | EmbeddingBody


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
            return _text_key(self.body.prompt)
        if isinstance(self.body, EmbeddingBody):
            return _text_key(self.body.input[0])
        parts = [f"{message.role}\x1f{message.text}\x1e" for message in self.body.messages]
        if self.body.offered_tools:  # templates write tools behind the system's text, or else first
            behind = 1 if self.body.messages[0].role in ("system", "developer") else 0
            tools = [tool.as_given() for tool in self.body.offered_tools]
            parts.insert(behind, f"tools\x1f{json.dumps(tools, ensure_ascii=False)}\x1e")
        return "m" + "".join(parts)


def _text_key(prompt: str | tuple[int, ...]) -> str:
    if isinstance(prompt, str):
        return f"t{prompt}"
    # Fixed width keeps numeric order; ids have 31 bits.
    return "i" + "".join(f"{token_id:08x}" for token_id in prompt)
