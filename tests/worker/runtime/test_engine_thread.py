"""The thread that steps the engine, and the resume states it hands on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.errors import CheckpointError, EngineUnavailable, InvalidRequest
from engine.request import FinishReason, Request, RequestOutput, ResumeState
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from tests.support.fake_engine import BREAK, FAIL, REFUSE, FakeEngine, GatedEngine, WritingEngine, answer, fed
from tests.support.processes import wait_until
from worker.requests.step_engine import StepEngine
from worker.runtime.counts import EngineMeter
from worker.runtime.engine_thread import EngineThread
from worker.runtime.window import AdmissionWindow

WAIT_S = 30


@contextmanager
def _running(engine: FakeEngine, *, max_open: int = 100) -> Iterator[tuple[EngineThread, list[BaseException]]]:
    failures: list[BaseException] = []
    window = AdmissionWindow(max_open, ageing_s=60.0)
    thread = EngineThread(lambda: engine, window=window, on_failure=failures.append)
    thread.start()
    try:
        yield thread, failures
    finally:
        assert thread.stop(WAIT_S)
    assert engine.is_closed is not bool(failures)  # one that broke is touched no more


def _request(request_id: str, prompt: str = "p") -> Request:
    return Request(request_id, list(prompt.encode()), SamplingParams())


def _run(thread: EngineThread, request: Request) -> RequestOutput:
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    with fed(thread, [request], outputs.put):
        (output,) = outputs.get(timeout=WAIT_S)
    return output


def test_every_request_gets_its_own_output() -> None:
    with _running(FakeEngine(steps_per_request=3)) as (thread, _):
        outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        texts: dict[str, str] = {}
        with fed(thread, [_request(str(n), f"prompt {n}") for n in range(20)], outputs.put):
            while len(texts) < 20:
                texts |= {output.request_id: output.completions[0].text for output in outputs.get(timeout=WAIT_S)}
    assert texts == {str(number): answer(f"prompt {number}") for number in range(20)}


def test_outputs_of_one_step_come_together_to_whom_they_belong() -> None:
    all_are_there = threading.Event()

    def wait_for_all(_outputs: list[RequestOutput]) -> None:
        all_are_there.wait(WAIT_S)

    with _running(FakeEngine()) as (thread, _):
        mine: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        other: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        with (
            fed(thread, [_request("first")], wait_for_all),
            fed(thread, [_request("a"), _request("b"), _request("c")], mine.put),
            fed(thread, [_request("d")], other.put),
        ):
            all_are_there.set()
            assert [output.request_id for output in mine.get(timeout=WAIT_S)] == ["a", "b", "c"]
            assert [output.request_id for output in other.get(timeout=WAIT_S)] == ["d"]


def test_the_engine_is_loaded_and_used_on_one_thread_only() -> None:
    threads: set[int] = set()

    class Watched(FakeEngine):
        def step(self) -> list[RequestOutput]:
            threads.add(threading.get_ident())
            return super().step()

    def load() -> StepEngine:
        threads.add(threading.get_ident())
        return Watched()

    thread = EngineThread(load, window=AdmissionWindow(1, ageing_s=60.0), on_failure=lambda _: None)
    thread.start()
    _run(thread, _request("a"))
    thread.stop(WAIT_S)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_what_loading_raises_is_raised_where_it_was_started() -> None:
    def load() -> StepEngine:
        raise CheckpointError("no config.json")

    with pytest.raises(CheckpointError, match=r"no config\.json"):
        EngineThread(load, window=AdmissionWindow(1, ageing_s=60.0), on_failure=lambda _: None).start()


def test_an_engine_that_cannot_give_its_figures_does_not_load() -> None:
    class Speechless(FakeEngine):
        def stats(self) -> EngineStats:
            raise EngineUnavailable("no figures")

    thread = EngineThread(
        Speechless, window=AdmissionWindow(1, ageing_s=60.0), on_failure=lambda error: pytest.fail(str(error))
    )
    with pytest.raises(EngineUnavailable, match="no figures"):
        thread.start()


def test_outputs_are_delivered_before_figures_are_asked_for() -> None:
    class Failing(FakeEngine):
        has_loaded = False

        def stats(self) -> EngineStats:
            if self.has_loaded:
                raise RuntimeError("no figures")
            self.has_loaded = True
            return super().stats()

    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    with _running(Failing()) as (thread, failures), fed(thread, [_request("a", "p")], outputs.put):
        (output,) = outputs.get(timeout=WAIT_S)
        wait_until(lambda: failures)
    assert output.completions[0].text == answer("p")


def test_a_refused_or_failed_request_ends_in_an_output_with_its_error() -> None:
    with _running(FakeEngine()) as (thread, failures):
        assert isinstance(_run(thread, _request("a", REFUSE)).error, InvalidRequest)
        assert isinstance(_run(thread, _request("b", FAIL)).error, EngineUnavailable)
        assert _run(thread, _request("c")).error is None
    assert failures == []


def test_there_is_no_room_beyond_the_bound_until_a_request_ends() -> None:
    engine = FakeEngine(steps_per_request=1_000_000, step_s=0.001)
    requests = [_request("a"), _request("b"), _request("c")]
    with _running(engine, max_open=2) as (thread, _), fed(thread, requests) as feed:
        wait_until(lambda: thread.num_steps > 1)
        assert (thread.num_open_requests, feed.num_waiting) == (2, 1)
        thread.abort(["a"])
        wait_until(lambda: (thread.num_open_requests, feed.num_waiting) == (2, 0))
        assert engine.most_open == 2


def test_prompts_that_were_not_taken_are_forgotten_with_their_feed() -> None:
    engine = FakeEngine(steps_per_request=1_000_000, step_s=0.001)
    with _running(engine, max_open=1) as (thread, _):
        with fed(thread, [_request("a"), _request("b")]) as feed:
            wait_until(lambda: thread.num_open_requests)
        assert feed.num_waiting == 0
        thread.abort(["a", "b"])
        wait_until(lambda: thread.is_idle)
        assert (engine.num_aborted, thread.num_open_requests) == (1, 0)


def test_an_aborted_request_leaves_the_engine_and_calls_nobody_back() -> None:
    engine = FakeEngine(steps_per_request=1_000_000, step_s=0.001)
    with _running(engine) as (thread, _):
        outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        with fed(thread, [_request("a")], outputs.put):
            wait_until(lambda: thread.num_steps > 0)
        thread.abort(["a", "never there"])
        wait_until(lambda: thread.is_idle)
        assert (engine.num_aborted, thread.num_open_requests) == (1, 0)
        assert outputs.empty()


def test_a_broken_engine_is_reported_once_and_takes_nothing_more() -> None:
    with _running(FakeEngine()) as (thread, failures):
        with fed(thread, [_request("a", BREAK)]):
            wait_until(lambda: failures)
        with fed(thread, [_request("b")]) as feed:
            assert feed.num_waiting == 1
        assert [str(failure) for failure in failures] == ["broken by the fake engine"]


def test_it_is_idle_until_there_is_a_request_and_counts_its_steps() -> None:
    with _running(FakeEngine(steps_per_request=4)) as (thread, _):
        assert thread.is_idle
        assert _run(thread, _request("a")).completions[0].finish_reason is FinishReason.STOP
        assert thread.num_steps == 4
        wait_until(lambda: thread.is_idle)
        assert thread.stalled_for_s == 0.0


def test_a_step_that_does_not_end_is_seen_from_outside() -> None:
    engine = GatedEngine()
    with _running(engine) as (thread, _), fed(thread, [_request("a")]):
        wait_until(lambda: thread.stalled_for_s > 0.2)
        engine.goes_on.set()


def test_an_idle_engine_shows_that_it_still_looks_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.engine_thread.IDLE_LOOK_S", 0.01)
    with _running(FakeEngine()) as (thread, _):
        with thread._changed:  # as long as somebody holds it, the engine cannot come round
            wait_until(lambda: thread.idle_overdue_s > 0.1)
        wait_until(lambda: thread.idle_overdue_s < 0.1)


def test_figures_are_told_after_the_last_step() -> None:
    meter = EngineMeter()
    thread = EngineThread(
        FakeEngine, window=AdmissionWindow(100, ageing_s=60.0), on_failure=lambda _: None, meter=meter
    )
    thread.start()
    assert meter.stats is not None
    assert meter.stats.num_steps == 0
    _run(thread, _request("one"))
    wait_until(lambda: meter.stats is not None and meter.stats.num_steps == 1)
    assert (meter.step_sequences.sum, list(meter.step_seconds.buckets())[-1]) == (1, ("+Inf", 1))
    assert thread.stop(WAIT_S)


@contextmanager
def _running_thread(engine: WritingEngine) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: engine, window=AdmissionWindow(10, ageing_s=60.0), on_failure=lambda _: None)
    thread.start()
    try:
        yield thread
    finally:
        assert thread.stop(WAIT_S)


def test_due_resume_states_reach_the_callback_before_the_output() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    with _running_thread(WritingEngine(interval=6)) as thread:
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
    with _running_thread(engine) as thread, fed(thread, requests, events.put):
        wait_until(lambda: engine.num_generated == 15)
        found = thread.suspend(["a", "b", "never there"], lambda: False)
        assert {name: bytes(resume_state.sequences[0].token_ids) for name, resume_state in found.items()} == {
            name: answer(name).encode()[:5] for name in ("a", "b")
        }
        wait_until(lambda: thread.num_open_requests == 1)
        assert engine.num_aborted == 2
        assert events.empty()


def test_a_request_that_ends_while_suspended_is_an_output() -> None:
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    resume_states: list[ResumeState] = []
    with _running_thread(WritingEngine(step_s=0.02)) as thread, fed(thread, [_request("a")], outputs.put):
        wait_until(lambda: thread.num_steps >= 15)  # of 16
        resume_states += thread.suspend(["a"], lambda: False).values()
        # Either it was taken out before its last token, or that token's output came first: never both, never neither.
        assert (len(resume_states), outputs.qsize()) in [(1, 0), (0, 1)]


def test_a_broken_engine_is_not_waited_for_on_suspension() -> None:
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
