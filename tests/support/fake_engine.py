"""Engines without a model: answers are deterministic, at once or token by token, and misbehave on request.

With them comes what surrounds an engine that does not run: a model as requests and records see it, one with a chat
template and answers as its tokens, figures, outputs, and prompts fed to an engine thread or a window without a shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import threading
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.errors import EngineError, EngineUnavailable, InvalidRequest
from engine.request import (
    AnyRequest,
    ClassificationRequest,
    Completion,
    EmbeddingRequest,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimings,
    ResumeState,
    SequenceResumeState,
    TokenLogprobs,
)
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from engine.text.tokenizer import Tokenizer
from settings import ModelSettings
from tests.support.tiny_tokenizer import EOS_TOKEN, ByteTokenizer, build_tokenizer, tokenizer_config
from worker.lines.request_line import PrefixKey, prefix_sort_key
from worker.requests.served_model import ServedModel
from worker.runtime.engine_thread import EngineThread
from worker.runtime.window import OnOutputs, OnResumeState, PromptFeed

# Words in a prompt, and what they make the engine do.
REFUSE = "*refuse*"  # add_request raises InvalidRequest
FAIL = "*fail*"  # the request ends in an error of its own
BREAK = "*break*"  # step raises: the engine is broken
QUOTE = "*quote*"  # likewise, with the prompt in the error's text and in local variables
HANG = "*hang*"  # step does not return for a minute
KILL = "*kill*"  # the process dies by kill -9

GATE_TIMEOUT_S = 60.0

EMBEDDING = (0.6, 0.8)  # of every input, unless the engine has a salt
CLASS_SCORES = (0.25, 0.75)  # of every input

_IDLE = EngineStats(device="cpu", dtype="float32", num_blocks=1)

TEMPLATES = Path(__file__).parent / "jinja"
# Which of the texts that templates give a meaning are special tokens. Qwen3's tokenizer has the marks as plain tokens.
QWEN3_TOKENS = {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False}
HERMES_TOKENS = dict.fromkeys(QWEN3_TOKENS, True)
LLAMA3_TOKENS = {"<|python_tag|>": True, "<|eot_id|>": True, "<|start_header_id|>": True, "<|end_header_id|>": True}


def answer(prompt: str, salt: str = "") -> str:
    """What the engine answers to a prompt, whatever else runs."""
    return hashlib.blake2b(f"{salt}{prompt}".encode(), digest_size=8).hexdigest()


class FakeEngine:
    """Advances up to `slots` requests one of `steps_per_request` steps in each step, oldest first.

    gate: a file. After `answers_before_gate` answers no request ends until it exists, however fast the machine is; a
    number in it is how many more may end, none: all. salt: engines of different ones are different models.
    """

    def __init__(
        self,
        *,
        steps_per_request: int = 1,
        step_s: float = 0.0,
        slots: int = 8,
        max_model_len: int = 4096,
        chat_template: str | None = None,
        gate: str = "",
        answers_before_gate: int = 0,
        salt: str = "",
        generates: bool = True,
    ) -> None:
        self.tokenizer = cast(Tokenizer, ByteTokenizer(chat_template))
        self.max_model_len = max_model_len
        self.generates = generates
        self.classifier: ClassifierConfig | None = None
        self.makes_comparable_embeddings = not generates
        self.num_aborted = 0
        self.most_open = 0
        self.is_closed = False
        self._steps_per_request = steps_per_request
        self._step_s = step_s
        self._slots = slots
        self._gate = Path(gate) if gate else None
        self._answers_before_gate = answers_before_gate
        self._num_passed = 0
        self._salt = salt
        self._open: dict[str, tuple[Request, int]] = {}  # request id -> request, steps left
        self._ready: list[RequestOutput] = []
        self._num_steps = 0
        self.step_size = (0, 0)
        self._began_s: dict[str, tuple[float, float | None]] = {}  # by request id: arrived, first advanced

    @property
    def open_request_ids(self) -> list[str]:
        return list(self._open)

    def add_request(self, request: AnyRequest) -> None:
        if isinstance(request, EmbeddingRequest):
            embeddings = tuple(array("f", self._embedding(token_ids)) for token_ids in request.inputs)
            self._ready.append(
                RequestOutput(request.request_id, request.num_prompt_tokens, 0, (), embeddings=embeddings)
            )
            return
        if isinstance(request, ClassificationRequest):
            scores = tuple(array("f", CLASS_SCORES) for _ in request.inputs)
            self._ready.append(RequestOutput(request.request_id, request.num_prompt_tokens, 0, (), class_scores=scores))
            return
        if request.request_id in self._open:
            raise AssertionError(f"{request.request_id} was added twice")
        if REFUSE in self._prompt(request):
            raise InvalidRequest("refused by the fake engine", param="prompt", value="...", code="refused")
        self._open[request.request_id] = (request, self._steps_per_request)
        self._began_s[request.request_id] = (time.monotonic(), None)
        self.most_open = max(self.most_open, len(self._open))

    def abort(self, request_id: str) -> bool:
        entry = self._open.pop(request_id, None)
        if entry is None:
            return False
        self.num_aborted += 1
        self._ready.append(self._output(entry[0], FinishReason.CANCELLED))
        return True

    def resume_state(self, request_id: str) -> ResumeState | None:
        return None  # its answers come whole

    def due_resume_states(self) -> dict[str, ResumeState]:
        return {}

    def step(self) -> list[RequestOutput]:
        time.sleep(self._step_s)
        scheduled = list(self._open.items())[: self._slots]
        self._num_steps += 1
        self.step_size = (len(scheduled), len(scheduled))
        for request_id, (request, steps_left) in scheduled:
            arrived_s, scheduled_s = self._began_s[request_id]
            self._began_s[request_id] = (arrived_s, scheduled_s or time.monotonic())
            self._misbehave(self._prompt(request))
            if steps_left > 1 or not self._passes_gate():
                self._open[request_id] = (request, max(steps_left - 1, 1))
                continue
            del self._open[request_id]
            self._ready.append(self._end(request))
        ready, self._ready = self._ready, []
        return ready

    def _passes_gate(self) -> bool:
        """Whether one more request may end."""
        if self._gate is None:
            return True
        num_allowed: float = self._answers_before_gate
        if self._num_passed >= num_allowed and self._gate.exists():
            num_allowed += float(self._gate.read_text() or "inf")
        may_end = self._num_passed < num_allowed
        self._num_passed += may_end
        return may_end

    def has_unfinished(self) -> bool:
        return bool(self._open or self._ready)

    def stats(self) -> EngineStats:
        return engine_stats(
            num_steps=self._num_steps,
            num_running=min(len(self._open), self._slots),
            num_waiting=max(len(self._open) - self._slots, 0),
        )

    def close(self) -> None:
        self.is_closed = True

    def _end(self, request: Request) -> RequestOutput:
        if FAIL in self._prompt(request):
            error = EngineUnavailable("failed by the fake engine")
            timings = replace(self._timings(request.request_id), first_token_s=None)
            return RequestOutput(request.request_id, 1, 0, (), error, timings=timings)
        return self._output(request, FinishReason.STOP)

    def _output(self, request: Request, reason: FinishReason) -> RequestOutput:
        text = answer(self._prompt(request), self._salt)
        completion = Completion(0, text, tuple(text.encode()), reason, None, None)
        timings = self._timings(request.request_id)
        return RequestOutput(request.request_id, len(request.prompt_token_ids), 1, (completion,), timings=timings)

    def _timings(self, request_id: str) -> RequestTimings:
        arrived_s, scheduled_s = self._began_s.pop(request_id)
        now_s = time.monotonic()
        return RequestTimings(arrived_s, scheduled_s, None if scheduled_s is None else now_s, now_s)

    def _embedding(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        if not self._salt:
            return EMBEDDING
        angle = int(answer(bytes(token_ids).decode(), self._salt), 16) / 2**64
        return math.cos(angle), math.sin(angle)

    @staticmethod
    def _prompt(request: Request) -> str:
        return bytes(request.prompt_token_ids).decode()

    @staticmethod
    def _misbehave(prompt: str) -> None:
        if KILL in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        if BREAK in prompt:
            raise RuntimeError("broken by the fake engine")
        if QUOTE in prompt:
            raise ValueError(f"broken by {prompt!r}")
        if HANG in prompt:
            time.sleep(60)


class GatedEngine(FakeEngine):
    """No step ends before `goes_on` is set: until then, whatever a test does happens during the first step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.goes_on = threading.Event()

    def step(self) -> list[RequestOutput]:
        assert self.goes_on.wait(GATE_TIMEOUT_S)
        return super().step()


class WritingEngine(FakeEngine):
    """Generates a token of each request in a step; every `interval` tokens a resume state is due."""

    def __init__(self, *, interval: int = 4, step_s: float = 0.0, stop_after: int = 1_000_000) -> None:
        super().__init__(step_s=step_s)
        self.num_generated = 0
        self.resumed: list[int] = []  # tokens that requests came with
        self._interval = interval
        self._stop_after = stop_after  # tokens after which a request goes no further
        self._written: dict[str, bytes] = {}
        self._due: list[str] = []

    def add_request(self, request: AnyRequest) -> None:
        assert isinstance(request, Request)
        super().add_request(request)
        came_with = bytes(request.resume.sequences[0].token_ids) if request.resume else b""
        self.resumed.append(len(came_with))
        self._written[request.request_id] = came_with

    def resume_state(self, request_id: str) -> ResumeState | None:
        written = self._written.get(request_id)
        return ResumeState("fake", 1, (SequenceResumeState(tuple(written), None),)) if written else None

    def due_resume_states(self) -> dict[str, ResumeState]:
        due, self._due = self._due, []
        found = {request_id: self.resume_state(request_id) for request_id in due}
        return {request_id: resume_state for request_id, resume_state in found.items() if resume_state is not None}

    def abort(self, request_id: str) -> bool:
        self._written.pop(request_id, None)
        return super().abort(request_id)

    def step(self) -> list[RequestOutput]:
        for request_id, (request, _) in list(self._open.items()):
            self._write(request_id, request)
        still_open, self._open = self._open, {}
        outputs = super().step()  # those that were aborted, and the pause
        self._open = still_open
        return outputs

    def _write(self, request_id: str, request: Request) -> None:
        whole = answer(self._prompt(request)).encode()
        written = self._written[request_id]
        if len(written) >= self._stop_after:
            return
        self._written[request_id] = written = whole[: len(written) + 1]
        self.num_generated += 1
        if written == whole:
            del self._written[request_id], self._open[request_id]
            completion = Completion(0, whole.decode(), tuple(whole), FinishReason.STOP, None, None)
            resumed = request.resume.num_tokens if request.resume else 0
            self._ready.append(
                RequestOutput(request_id, len(request.prompt_token_ids), 0, (completion,), num_resumed_tokens=resumed)
            )
        elif len(written) % self._interval == 0:
            self._due.append(request_id)


def engine_stats(**figures: Any) -> EngineStats:
    """The figures of an engine that has done nothing, but for `figures`."""
    return replace(_IDLE, **figures)


def served_model(
    tokenizer: Tokenizer,
    *,
    max_model_len: int = 1 << 20,
    generates: bool = True,
    classifier: ClassifierConfig | None = None,
    compares: bool = True,
    **settings: Any,
) -> ServedModel:
    """A model called "m" of this tokenizer; `settings`: those of ModelSettings."""
    engine = FakeEngine(max_model_len=max_model_len)
    engine.tokenizer, engine.generates, engine.classifier = tokenizer, generates, classifier
    engine.makes_comparable_embeddings = compares
    return ServedModel(engine, ModelSettings(**{"name": "m", **settings}))


def template_source(name: str) -> str:
    """A template of tests/support/jinja."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def chat_model(path: Path, template: str, tokens: Mapping[str, bool]) -> Tokenizer:
    """The tokenizer, written into the directory `path`; `tokens`: added token -> whether it is special."""
    tokenizer = build_tokenizer()
    added = {
        special: [AddedToken(text, special=special) for text in tokens if tokens[text] is special]
        for special in (True, False)
    }
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = tokenizer_config() | {"bos_token": "<|endoftext|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_directory(path)


def answered(
    tokenizer: Tokenizer,
    text: str,
    *,
    finish_reason: FinishReason = FinishReason.STOP,
    stop: str | None = None,
    index: int = 0,
) -> Completion:
    """A completion of `text` as the engine ends it; `stop`: the stop string that `text` holds and that ended it."""
    token_ids = tokenizer.encode(text)
    if finish_reason is FinishReason.STOP and stop is None:
        token_ids += tokenizer.encode(EOS_TOKEN)
    shown = tokenizer.decode(token_ids)
    if stop is not None:
        shown = shown[: shown.index(stop)]
    return Completion(index, shown, tuple(token_ids), finish_reason, stop, None)


def completion(
    text: str = "ok",
    *,
    index: int = 0,
    token_ids: Sequence[int] = (7, 8),
    finish_reason: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
    logprobs: Sequence[TokenLogprobs] | None = None,
) -> Completion:
    """A finished completion."""
    kept = None if logprobs is None else tuple(logprobs)
    return Completion(index, text, tuple(token_ids), finish_reason, stop_reason, kept)


def request_output(request_id: str = "0", *completions: Completion, error: EngineError | None = None) -> RequestOutput:
    """The end of a request with 5 prompt tokens, 4 of them cached; one completion unless told."""
    found = completions if completions or error else (completion(),)
    return RequestOutput(request_id, num_prompt_tokens=5, num_cached_tokens=4, completions=found, error=error)


def make_feed(tenant: str = "t", priority: int = 5) -> PromptFeed:
    """A feed whose outputs nobody reads."""
    return PromptFeed(tenant, priority, on_outputs=lambda _: None)


def prompts(texts: Sequence[str], *, of: str = "", max_tokens: int = 1) -> list[tuple[PrefixKey, Request]]:
    """What a shard offers for these prompts. A request's id is `of`, the text, and a unique part after a #."""
    params = SamplingParams(max_tokens=max_tokens)
    return [
        (prefix_sort_key(text), Request(f"{of}{text}#{uuid.uuid4()}", list(text.encode()), params)) for text in texts
    ]


@contextmanager
def fed(
    thread: EngineThread,
    requests: Sequence[Request],
    on_outputs: OnOutputs = lambda _: None,
    on_resume_state: OnResumeState = lambda _, __: None,
) -> Iterator[PromptFeed]:
    """A feed of these requests, in order, for the length of the block."""
    feed = PromptFeed("t", 5, on_outputs=on_outputs, on_resume_state=on_resume_state)
    with thread.fed_by(feed):
        thread.offer(feed, [((b"",), request) for request in requests], is_last=True)
        yield feed
