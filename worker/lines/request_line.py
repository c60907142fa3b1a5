"""Defines a request line that can be run, and sort keys that put prompts with a shared prefix side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from worker.lines.bodies import CompletionBody, EmbeddingBody, InputBody
from worker.lines.chat import ChatBody
from worker.lines.scoring import ClassifyBody, PairBody, RerankBody, ScoreBody

GeneratingBody = CompletionBody | ChatBody
RequestBody = GeneratingBody | EmbeddingBody | ScoreBody | RerankBody | ClassifyBody

HEAD_BYTES = 1024  # compared byte by byte
# Beyond the head, prompts that agree up to one of these lengths are put side by side, in no particular order.
LEVELS_BYTES = (4_096, 16_384, 65_536)
_NO_LEVELS = (b"",) * len(LEVELS_BYTES)  # of a prompt that its head holds

PrefixKey = tuple[bytes, ...]


class Endpoint(StrEnum):
    """What a request asks for. Values are OpenAI's paths, and vLLM's, as `url` spells them."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    SCORE = "/v1/score"
    RERANK = "/v1/rerank"
    CLASSIFY = "/classify"


# What shows what a body alone is for; of several endpoints that take it, it is for the first.
PROMPT_KEYS: Mapping[str, tuple[Endpoint, ...]] = {
    "messages": (Endpoint.CHAT_COMPLETIONS,),
    "prompt": (Endpoint.COMPLETIONS,),
    "input": (Endpoint.EMBEDDINGS, Endpoint.RESPONSES, Endpoint.CLASSIFY),
    "query": (Endpoint.RERANK,),
} | {first: (Endpoint.SCORE,) for first, _ in ScoreBody.forms}
# What else makes a body the request that it is.
SECOND_KEYS = tuple(dict.fromkeys(["documents", *(second for _, second in ScoreBody.forms)]))


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line of a job, checked as far as that is possible without the model."""

    index: int  # 0-based position in the job
    custom_id: str
    endpoint: Endpoint
    body: RequestBody

    def prompt_key(self) -> str:
        """Text whose order is prompt order: two prompts with a long common beginning sort next to each other.

        It stands in for the token prefix where no tokeniser is at hand. Keys of token prompts, text prompts and
        conversations begin with different characters.
        """
        if isinstance(self.body, CompletionBody):
            return _text_key(self.body.prompt)
        if isinstance(self.body, InputBody):
            return _text_key(self.body.input[0])
        if isinstance(self.body, PairBody):
            return _text_key("\x1e".join(self.body.pairs[0]))
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


ANY_MODEL = "*"  # an alias: every name that means no other model


def names_model(name: str, served: str) -> bool:
    """A hub name such as Qwen/Qwen3-0.6B also means the directory Qwen3-0.6B."""
    return served in (name, name.rpartition("/")[2])


def shard_head(key: PrefixKey) -> str:
    """Where a shard whose first prompt has this key sorts among shards, as Redis compares texts in any locale."""
    return key[0].hex()


def prefix_sort_key(prompt_key: str) -> PrefixKey:
    """A key of bounded size whose order puts prompts with a long common beginning side by side.

    The keys of a job are all in memory at once: 50 000 prompts of 256 KiB would be 13 GB, their keys are 60 MB.
    """
    data = prompt_key.encode("utf-8", "surrogatepass")
    if len(data) <= HEAD_BYTES:
        return (data, *_NO_LEVELS)
    levels = (hashlib.blake2b(data[:length], digest_size=8).digest() for length in LEVELS_BYTES)
    return (data[:HEAD_BYTES], *levels)
