"""A fake engine whose answers come token by token, and that can go on from a checkpoint."""

from __future__ import annotations

from engine.request import (
    AnyRequest,
    Completion,
    FinishReason,
    Request,
    RequestOutput,
    SequenceCheckpoint,
    TokenCheckpoint,
)
from tests.support.fake_engine import FakeEngine, answer


class WritingEngine(FakeEngine):
    """A step is a token of each request; every `interval` tokens a checkpoint is due. Answers are `answer`'s."""

    def __init__(self, *, interval: int = 4, step_s: float = 0.0, stop_after: int = 1_000_000) -> None:
        super().__init__(step_s=step_s)
        self.num_generated = 0
        self.resumed: list[int] = []  # tokens that requests came with
        self._interval = interval
        self._stop_after = stop_after  # tokens of a request after which it gets no further
        self._written: dict[str, bytes] = {}
        self._due: list[str] = []

    def add_request(self, request: AnyRequest) -> None:
        assert isinstance(request, Request)
        super().add_request(request)
        came_with = bytes(request.resume.sequences[0].token_ids) if request.resume else b""
        self.resumed.append(len(came_with))
        self._written[request.request_id] = came_with

    def checkpoint(self, request_id: str) -> TokenCheckpoint | None:
        written = self._written.get(request_id)
        return TokenCheckpoint("fake", 1, (SequenceCheckpoint(tuple(written), None),)) if written else None

    def due_checkpoints(self) -> dict[str, TokenCheckpoint]:
        due, self._due = self._due, []
        found = {request_id: self.checkpoint(request_id) for request_id in due}
        return {request_id: checkpoint for request_id, checkpoint in found.items() if checkpoint is not None}

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
