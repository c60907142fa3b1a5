"""Defines what the worker needs of an engine, and how many requests it gives the engine ahead."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from engine.request import AnyRequest, PooledRequest, RequestOutput, ResumeState
from worker.lines.request_line import Endpoint

if TYPE_CHECKING:
    from engine.checkpoint.classifier_config import ClassifierConfig
    from engine.stats import EngineStats
    from engine.text.tokenizer import Tokenizer

# Sequences in the engine, as a multiple of those that run at once: the others wait there, sorted by prefix.
WINDOW_FACTOR = 8

GC_THRESHOLD = 10_000  # objects that may be made, less those freed, before the next collection


class StepEngine(Protocol):
    """The part of `engine.engine.Engine` that the worker uses; tests put a double in its place.

    Called by one thread. Every added request ends in exactly one RequestOutput, which `step` returns.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokeniser; may be used from other threads."""

    @property
    def max_model_len(self) -> int:
        """Tokens one request may have, prompt and output together."""

    @property
    def generates(self) -> bool:
        """Whether it continues prompts."""

    @property
    def classifier(self) -> ClassifierConfig | None:
        """The classes that it scores; None: it makes embeddings instead."""

    @property
    def makes_comparable_embeddings(self) -> bool:
        """Whether the cosine of two of its embeddings says how well the texts go together."""

    def add_request(self, request: AnyRequest) -> None:
        """Queue a request. Raises InvalidRequest for one that can never be served, EngineFatal once a step failed."""

    def abort(self, request_id: str) -> bool:
        """End a request now and free its KV; False if it has ended already."""

    def resume_state(self, request_id: str) -> ResumeState | None:
        """How far a request has come; None if it has ended or has generated nothing."""

    def due_resume_states(self) -> Mapping[str, ResumeState]:
        """Resume states that came due, by request id; asking is optional."""

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that ended. Raises EngineFatal once a step failed."""

    def has_unfinished(self) -> bool:
        """Whether `step` has something to run, to hand out or to raise."""

    @property
    def step_size(self) -> tuple[int, int]:
        """Sequences and tokens of the step that the last call of `step` began; (0, 0) where it began none."""

    def stats(self) -> EngineStats:
        """Figures at this moment."""

    def close(self) -> None:
        """Give everything back."""


def served_endpoints(*, generates: bool, compares: bool, classifier: ClassifierConfig | None) -> tuple[Endpoint, ...]:
    """What a model answers, in the order of Endpoint. Without a head of classes pairs are scored by embeddings.

    compares: whether these are made for it, see StepEngine. The hidden states of a model that only generates are not,
    and lines without a model would have it to choose from beside a reranker.
    """
    generating = (Endpoint.CHAT_COMPLETIONS, Endpoint.COMPLETIONS, Endpoint.RESPONSES) if generates else ()
    pairs = (Endpoint.SCORE, Endpoint.RERANK)
    if classifier is None:
        return (*generating, Endpoint.EMBEDDINGS, *(pairs if compares else ()))
    return (*(pairs if classifier.scores_pairs else ()), Endpoint.CLASSIFY)


def spare_collections() -> None:
    """Leave out of this process' garbage collections what there is now, and let them come rarely: once the engine is
    loaded.

    They took 8 us a prompt in a queue without a model, 3 since they pass over the 90,000 objects that stay (more with
    torch) and come more rarely than with every 700 more lists and tuples, which stopped a GPU's steps for 12 to 23 ms
    three times in 5 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def request_window(max_num_seqs: int) -> int:
    """Sequences to keep in an engine that runs up to `max_num_seqs` at once."""
    return WINDOW_FACTOR * max_num_seqs


def request_room(request: AnyRequest) -> int:
    """How many of a window's sequences a request takes: one for each input (up to 2,048), or for each of its answers
    and of the continuations that it has scored.
    """
    if isinstance(request, PooledRequest):
        return len(request.inputs)
    return request.params.n + len(request.continuations)
