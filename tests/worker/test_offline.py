"""OfflineRun over a scripted engine: which line gets which record, when, and under which number."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.errors import EngineFatal, EngineUnavailable, InvalidRequest
from engine.request import AnyRequest, Request, RequestOutput, ResumeState
from engine.stats import EngineStats
from engine.text.tokenizer import Tokenizer
from settings import LimitSettings, ModelSettings, Settings
from tests.support.fake_engine import FakeEngine, completion, request_output
from tests.support.registry import TestRegistry, running_units
from tests.support.request_lines import completion_line, raw_line
from tests.support.tiny_tokenizer import make_tokenizer
from worker.client import BatchClient
from worker.lines.files import read_raw_lines
from worker.offline import LineFeed, OfflineRun
from worker.registry.keys import UnitRef

Record = Mapping[str, object]

MAX_LINE_BYTES = 1000
FILE = b'\n\n{"prompt": 1}\n   \n{"prompt": "a", "n": 0}\r\n\r\n{bad\n{"prompt": 2, "custom_id": "mine"}'
EXPECTED = [(1, "line-1", "prompt"), (2, "line-2", "n"), (3, None, None), (4, "mine", "prompt")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return Tokenizer.from_directory(path)


class ScriptedEngine:
    """Ends one request a step, the youngest first; a seed says how a request misbehaves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.settings = Settings()
        self.tokenizer = tokenizer
        self.max_model_len = 100
        self.generates = True
        self.classifier: ClassifierConfig | None = None
        self.makes_comparable_embeddings = False
        self.step_size = (0, 0)
        self.waiting: list[Request] = []
        self.most_waiting = 0

    def add_request(self, request: AnyRequest) -> None:
        assert isinstance(request, Request)
        if request.params.seed == 400:
            raise InvalidRequest("too odd", param="prompt", code="too_odd")
        self.waiting.append(request)
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def abort(self, request_id: str) -> bool:
        raise AssertionError(f"nobody cancels {request_id}")

    def resume_state(self, request_id: str) -> ResumeState | None:
        return None

    def due_resume_states(self) -> dict[str, ResumeState]:
        return {}

    def step(self) -> list[RequestOutput]:
        request = self.waiting.pop()
        if request.params.seed == 666:
            self.waiting.append(request)
            raise EngineFatal("the pool is broken")
        if request.params.seed == 503:
            return [request_output(request.request_id, error=EngineUnavailable("no room"))]
        return [request_output(request.request_id, completion(f"answer {request.request_id}"))]

    def has_unfinished(self) -> bool:
        return bool(self.waiting)

    def stats(self) -> EngineStats:
        raise AssertionError("not asked for")

    def close(self) -> None:
        self.waiting.clear()


class Harness:
    """One run and what it wrote."""

    def __init__(self, tokenizer: Tokenizer, window: int = 4) -> None:
        self.engine = ScriptedEngine(tokenizer)
        self.records: list[Record] = []
        self.offline = OfflineRun(self.engine, ModelSettings(name="tiny"), window=window, write=self.records.append)

    def run(self, lines: Iterable[bytes], should_stop: Callable[[], bool] = lambda: False) -> None:
        feed = LineFeed(lines, LimitSettings(), capacity=8, by_prefix=True)
        feed.start()
        self.offline.run(feed, should_stop, lambda: None)
        while feed.take(1, 5.0):  # what a run that stopped left there keeps the feed's thread waiting
            pass

    def status_codes(self) -> dict[str, int]:
        return {str(record["custom_id"]): record["response"]["status_code"] for record in self.records}  # type: ignore[index]  # JSON


def test_every_line_ends_in_exactly_one_record(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)

    harness.run([completion_line() for _ in range(20)])

    assert sorted(harness.status_codes()) == sorted(f"line-{number}" for number in range(1, 21))
    assert len(harness.records) == 20
    assert set(harness.status_codes().values()) == {200}


def test_bad_lines_become_errors_and_their_neighbours_run(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)

    harness.run(
        [
            completion_line(custom_id="good"),
            completion_line(custom_id="typo", temprature=1),
            completion_line(custom_id="refused by the engine", seed=400),
            completion_line(custom_id="other model", model="gpt-4o"),
            completion_line(custom_id="no room", seed=503),
            completion_line(custom_id="good", seed=1),
            b"\xff",
        ]
    )

    codes = harness.status_codes()
    assert codes["typo"] == codes["refused by the engine"] == codes["other model"] == codes["None"] == 400
    assert codes["no room"] == 503
    assert sorted(r["response"]["status_code"] for r in harness.records if r["custom_id"] == "good") == [200, 400]  # type: ignore[index]  # JSON
    errors = [r["response"]["body"]["error"] for r in harness.records if r["response"]["status_code"] != 200]  # type: ignore[index]  # JSON
    assert {error["line"] for error in errors} == {2, 3, 4, 5, 6, 7}


def test_never_more_than_the_window_is_in_the_engine(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, window=3)

    harness.run([completion_line() for _ in range(30)])

    assert harness.engine.most_waiting <= 3
    assert len(harness.records) == 30


def test_the_window_counts_the_choices_of_a_request(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, window=6)

    harness.run([completion_line(n=3) for _ in range(30)])

    assert harness.engine.most_waiting == 2
    assert len(harness.records) == 30


def test_lines_that_are_there_are_tokenised_together(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode_batch, sizes = tokenizer.encode_batch, list[int]()
    are_read = threading.Event()

    def lines() -> Iterator[bytes]:
        yield from (completion_line() for _ in range(40))
        are_read.set()

    def counting(texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        sizes.append(len(texts))
        return encode_batch(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", counting)
    harness = Harness(tokenizer)
    feed = LineFeed(lines(), LimitSettings(), capacity=50, by_prefix=False)
    feed.start()
    assert are_read.wait(5.0)

    harness.offline.run(feed, lambda: False, lambda: None)

    assert [size for size in sizes if size] == [32, 8]
    assert harness.engine.most_waiting <= 4
    assert len(harness.records) == 40


def test_a_stop_between_steps_keeps_what_was_finished(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)

    harness.run([completion_line() for _ in range(30)], should_stop=lambda: len(harness.records) >= 5)

    assert len(harness.records) == 5
    for record in harness.records:
        json.dumps(record)


def test_a_broken_engine_ends_its_requests_with_a_server_error(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer, window=2)

    with pytest.raises(EngineFatal):
        harness.run([completion_line(custom_id="a"), completion_line(custom_id="b", seed=666)])

    assert harness.status_codes()["b"] == 500
    assert len(harness.records) == 2


def test_a_line_over_which_the_tokeniser_fails_fails_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = tokenizer.encode

    def fail_on_poison(text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text == "poison":
            raise RuntimeError("a panic inside the tokeniser")
        return encode(text, add_special_tokens=add_special_tokens)

    def fail_with_poison(texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [fail_on_poison(text, add_special_tokens=add_special_tokens) for text in texts]

    monkeypatch.setattr(tokenizer, "encode", fail_on_poison)
    monkeypatch.setattr(tokenizer, "encode_batch", fail_with_poison)
    harness = Harness(tokenizer)

    harness.run([completion_line(custom_id="a"), raw_line({"prompt": "poison", "custom_id": "b"}), completion_line()])

    assert harness.status_codes() == {"a": 200, "b": 500, "line-3": 200}
    assert "a panic inside the tokeniser" in caplog.text


def test_the_summary_counts_records_and_tokens(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)

    harness.run([completion_line(), completion_line(n=0), completion_line()])

    summary = harness.offline.summary(load_s=1.5)
    assert (summary.requests, summary.failed) == (3, 1)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (10, 8, 4)
    assert summary.load_s == 1.5
    assert summary.elapsed_s > 0


def test_an_empty_input_is_a_run_of_nothing(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)

    harness.run([])

    assert harness.records == []


def test_a_failing_read_is_reported(tokenizer: Tokenizer) -> None:
    def broken() -> Iterator[bytes]:
        yield completion_line()
        raise OSError("disk on fire")

    harness = Harness(tokenizer)
    feed = LineFeed(broken(), LimitSettings(), capacity=8, by_prefix=False)
    feed.start()

    with pytest.raises(OSError, match="disk on fire"):
        harness.offline.run(feed, lambda: False, lambda: None)


def test_token_ids_of_a_line_reach_the_engine(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    seen: list[Request] = []
    harness.engine.add_request = seen.append  # type: ignore[assignment, method-assign]  # only looked at

    harness.run([raw_line({"prompt": [5, 6]})], should_stop=lambda: bool(seen))

    assert list(seen[0].prompt_token_ids) == [5, 6]


def numbered(records: list[dict[str, Any]]) -> list[tuple[int, str | None, str | None]]:
    errors = [(record["response"]["body"]["error"], record["custom_id"]) for record in records]
    return sorted((error["line"], custom_id, error["param"]) for error, custom_id in errors)


def test_offline_counts_requests_and_not_blank_lines() -> None:
    records: list[dict[str, Any]] = []
    engine = FakeEngine()
    run = OfflineRun(engine, ModelSettings(name="m"), window=4, write=lambda record: records.append({**record}))
    raw_lines = read_raw_lines(io.BytesIO(FILE), MAX_LINE_BYTES)
    feed = LineFeed(raw_lines, LimitSettings(), capacity=4, by_prefix=True)
    feed.start()

    run.run(feed, lambda: False, lambda: None)

    assert numbered(records) == EXPECTED


def test_the_queue_counts_as_offline_does(redis_url: str, registry: TestRegistry) -> None:
    with BatchClient(redis_url) as client:
        from_file = client.submit(read_raw_lines(io.BytesIO(FILE), MAX_LINE_BYTES))
        from_list = client.submit(FILE.split(b"\n"))
    with running_units(registry) as units:
        for job_id in (from_file, from_list):
            units.planner().plan(units.hold(UnitRef.plan(job_id)))

            records = [json.loads(record) for record in registry.records(job_id)]
            assert numbered(records) == EXPECTED
