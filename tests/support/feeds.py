"""Prompts into an engine thread or a window, without a shard."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.request import Request
from engine.sampling_params import SamplingParams
from worker.lines.request_line import PrefixKey, prefix_sort_key
from worker.runtime.engine_thread import EngineThread
from worker.runtime.window import OnCheckpoint, OnOutputs, PromptFeed


def make_feed(tenant: str = "t", priority: int = 5) -> PromptFeed:
    """A feed nobody listens to."""
    return PromptFeed(tenant, priority, on_outputs=lambda _: None)


def prompts(texts: Sequence[str], *, of: str = "", max_tokens: int = 1) -> list[tuple[PrefixKey, Request]]:
    """What a shard offers for these prompts. A request's id is `of` and the text, then something unique after a #."""
    params = SamplingParams(max_tokens=max_tokens)
    return [
        (prefix_sort_key(text), Request(f"{of}{text}#{uuid.uuid4()}", list(text.encode()), params)) for text in texts
    ]


@contextmanager
def fed(
    thread: EngineThread,
    requests: Sequence[Request],
    on_outputs: OnOutputs = lambda _: None,
    on_checkpoint: OnCheckpoint = lambda _, __: None,
) -> Iterator[PromptFeed]:
    """A feed of these requests, in this order, for as long as the block runs."""
    feed = PromptFeed("t", 5, on_outputs=on_outputs, on_checkpoint=on_checkpoint)
    with thread.fed_by(feed):
        thread.offer(feed, [((b"",), request) for request in requests], is_last=True)
        yield feed
