"""A StepEngine without a model: deterministic answers, and misbehaviour on request."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from array import array
from dataclasses import replace
from typing import cast

from engine.engine import EngineStats
from engine.errors import EngineUnavailable, InvalidRequest
from engine.request import (
    AnyRequest,
    Completion,
    EmbeddingRequest,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimings,
    TokenCheckpoint,
)
from engine.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.engine_stats import engine_stats

# Words in a prompt, and what they make the engine do.
REFUSE = "*refuse*"  # add_request raises InvalidRequest
FAIL = "*fail*"  # the request ends in an error of its own
BREAK = "*break*"  # step raises: the engine is broken
QUOTE = "*quote*"  # likewise, with the prompt in the error's text and in local variables
HANG = "*hang*"  # step does not return for a minute
KILL = "*kill*"  # the process dies by kill -9

EMBEDDING = (0.6, 0.8)  # of every input


def answer(prompt: str) -> str:
    """What the engine answers to a prompt, whatever else runs."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()


class FakeEngine:
    """Advances up to `slots` requests one of `steps_per_request` steps in each step, oldest first."""

    def __init__(
        self,
        *,
        steps_per_request: int = 1,
        step_s: float = 0.0,
        slots: int = 8,
        max_model_len: int = 4096,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = cast(Tokenizer, ByteTokenizer(chat_template))
        self.max_model_len = max_model_len
        self.generates = True
        self.num_aborted = 0
        self.most_open = 0
        self.is_closed = False
        self._steps_per_request = steps_per_request
        self._step_s = step_s
        self._slots = slots
        self._open: dict[str, tuple[Request, int]] = {}  # request id -> request, steps left
        self._ready: list[RequestOutput] = []
        self._num_steps = 0
        self.step_size = (0, 0)
        self._began_s: dict[str, tuple[float, float | None]] = {}  # by request id: arrived, first advanced

    def add_request(self, request: AnyRequest) -> None:
        if isinstance(request, EmbeddingRequest):
            embeddings = tuple(array("f", EMBEDDING) for _ in request.inputs)
            self._ready.append(
                RequestOutput(request.request_id, request.num_prompt_tokens, 0, (), embeddings=embeddings)
            )
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

    def checkpoint(self, request_id: str) -> TokenCheckpoint | None:
        return None  # its answers come whole

    def due_checkpoints(self) -> dict[str, TokenCheckpoint]:
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
            if steps_left > 1:
                self._open[request_id] = (request, steps_left - 1)
                continue
            del self._open[request_id]
            self._ready.append(self._end(request))
        ready, self._ready = self._ready, []
        return ready

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
        text = answer(self._prompt(request))
        completion = Completion(0, text, tuple(text.encode()), reason, None, None)
        timings = self._timings(request.request_id)
        return RequestOutput(request.request_id, len(request.prompt_token_ids), 1, (completion,), timings=timings)

    def _timings(self, request_id: str) -> RequestTimings:
        arrived_s, scheduled_s = self._began_s.pop(request_id)
        now_s = time.monotonic()
        return RequestTimings(arrived_s, scheduled_s, None if scheduled_s is None else now_s, now_s)

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
