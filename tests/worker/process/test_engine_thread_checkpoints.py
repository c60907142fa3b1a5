from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from engine.request import Request, RequestOutput, TokenCheckpoint
from engine.sampling_params import SamplingParams
from tests.support.fake_engine import BREAK, answer
from tests.support.feeds import fed
from tests.support.wait_until import wait_until
from tests.support.writing_engine import WritingEngine
from worker.runtime.engine_thread import EngineThread
from worker.runtime.window import AdmissionWindow

WAIT_S = 5


@contextmanager
def _running(engine: WritingEngine) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: engine, window=AdmissionWindow(10, ageing_s=60.0), on_failure=lambda _: None)
    thread.start()
    try:
        yield thread
    finally:
        assert thread.stop(WAIT_S)


def _request(request_id: str, prompt: str = "p") -> Request:
    return Request(request_id, list(prompt.encode()), SamplingParams())


def test_checkpoints_that_come_due_reach_their_requests_callback_before_its_output() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    with _running(WritingEngine(interval=6)) as thread:
        requests = [_request(name, name) for name in ("a", "b")]
        with fed(thread, requests, events.put, lambda *event: events.put(event)):
            found = [events.get(timeout=WAIT_S) for _ in range(5)]
    told = [(event[0], event[1].num_tokens) for event in found if isinstance(event, tuple)]
    assert sorted(told) == [("a", 6), ("a", 12), ("b", 6), ("b", 12)]
    assert isinstance(found[-1], list)
    assert [output.request_id for output in found[-1]] == ["a", "b"]
    assert events.empty()


def test_a_suspended_request_leaves_the_engine_with_what_it_had_generated() -> None:
    engine = WritingEngine(step_s=0.001, stop_after=5)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    requests = [_request(name, name) for name in ("a", "b", "stays")]
    with _running(engine) as thread, fed(thread, requests, events.put):
        wait_until(lambda: engine.num_generated == 15)
        found = thread.suspend(["a", "b", "never there"], lambda: False)
        assert {name: bytes(checkpoint.sequences[0].token_ids) for name, checkpoint in found.items()} == {
            name: answer(name).encode()[:5] for name in ("a", "b")
        }
        wait_until(lambda: thread.num_open_requests == 1)
        assert engine.num_aborted == 2
        assert events.empty()


def test_a_request_that_ends_in_the_step_that_runs_is_an_output_not_a_checkpoint() -> None:
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    checkpoints: list[TokenCheckpoint] = []
    with _running(WritingEngine(step_s=0.02)) as thread, fed(thread, [_request("a")], outputs.put):
        wait_until(lambda: thread.num_steps == 15)  # of 16
        checkpoints += thread.suspend(["a"], lambda: False).values()
        # Either it was taken out before its last token, or that token's output came first: never both, never neither.
        assert (len(checkpoints), outputs.qsize()) in [(1, 0), (0, 1)]


def test_an_engine_that_broke_has_no_checkpoints_to_give_and_is_not_waited_for() -> None:
    failures: list[BaseException] = []
    thread = EngineThread(WritingBroken, window=AdmissionWindow(1, ageing_s=60.0), on_failure=failures.append)
    thread.start()
    with fed(thread, [_request("a", BREAK)]):
        wait_until(lambda: failures)
    assert thread.suspend(["a"], lambda: False) == {}
    assert thread.stop(WAIT_S)


class WritingBroken(WritingEngine):
    def step(self) -> list[RequestOutput]:
        raise RuntimeError("broken for a test")
