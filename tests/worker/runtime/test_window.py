"""The order in which prompts of several shards go into the engine. Keys and texts are single letters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import pytest

from engine.request import AnyRequest, EmbeddingRequest, Request
from engine.sampling_params import SamplingParams
from tests.support.fake_engine import make_feed, prompts
from worker.requests.step_engine import request_room
from worker.runtime.window import LOW_WATER, OVERTAKES, AdmissionWindow, FeedSweep, PromptFeed

AGEING_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Harness:
    """A window and what it gave out, in order."""

    def __init__(self, max_open: int) -> None:
        self.clock = Clock()
        self.window = AdmissionWindow(max_open, ageing_s=AGEING_S, clock=self.clock)
        self.open: list[str] = []
        self.ranks: dict[str, int] = {}

    def feed(self, texts: Sequence[str], *, tenant: str = "t", priority: int = 5, is_last: bool = True) -> PromptFeed:
        """A shard of these prompts; its requests' ids are the tenant and the text."""
        feed = make_feed(tenant, priority)
        self.window.join(feed)
        feed.offer(prompts(texts, of=tenant), is_last=is_last)
        return feed

    def take(self) -> str:
        """Texts of what goes in now."""
        taken = [request for request, _ in self.window.take() if isinstance(request, Request)]
        self.open += [request.request_id for request in taken]
        self.ranks |= {request.request_id.partition("#")[0]: request.priority for request in taken}
        return "".join(bytes(request.prompt_token_ids).decode() for request in taken)

    def end(self, count: int = 1) -> None:
        """The requests that went in first end."""
        ended, self.open = self.open[:count], self.open[count:]
        for request_id in ended:
            self.window.end(request_id)

    def run(self) -> str:
        """One request after the other, until nothing is left."""
        order = self.take()
        while self.open:
            self.end()
            order += self.take()
        return order


def test_shards_are_merged_in_prefix_order() -> None:
    harness = Harness(1)
    harness.feed("adg")
    harness.feed("behi")
    harness.feed("f")
    assert harness.run() == "abdefghi"


def test_a_shard_that_comes_later_catches_up_and_then_goes_along() -> None:
    harness = Harness(2)
    harness.feed("acegi")
    assert harness.take() == "ac"
    harness.feed("bgh")
    harness.end(2)
    assert harness.take() == "be"
    harness.end(2)
    assert harness.take() == "gg"


def test_a_shard_is_passed_by_so_many_and_then_goes_on_to_its_end() -> None:
    harness = Harness(1)
    harness.feed("xyz")
    harness.feed("a" * (4 * OVERTAKES))
    order = harness.run()
    assert order == "a" * (OVERTAKES + 1) + "xyz" + "a" * (3 * OVERTAKES - 1)


@pytest.mark.parametrize("seed", range(200))
def test_prompts_taken_in_one_go_are_those_taken_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    shards = ["".join(sorted(draw.choices("abcdef", k=draw.randint(1, 30)))) for _ in range(draw.randint(1, 6))]
    max_overtakes = draw.randint(1, 20)
    being_read = draw.sample("012345", draw.randint(0, 3))  # feeds of which more is to come

    def order(num_together: int) -> list[str]:
        sweep, feeds = FeedSweep(max_overtakes), [make_feed(f"{number}") for number in range(len(shards))]
        taken: list[str] = []
        for feed, texts in zip(feeds, shards, strict=True):
            sweep.add(feed)
            feed.offer(prompts(texts), is_last=feed.tenant not in being_read)
        while sweep.is_ready:
            due = sweep.due()
            if must_wait := not due.num_waiting:
                due = sweep.due(must_wait=True)
            requests = sweep.take(due, must_wait=must_wait)
            taken += [due.tenant + request.request_id[0] for request in islice(requests, num_together)]
        return taken

    assert order(1000) == order(1)


def test_no_more_than_the_window_is_in_the_engine() -> None:
    harness = Harness(3)
    harness.feed("abcdef")
    assert harness.take() == "abc"
    assert harness.take() == ""
    harness.end(2)
    assert harness.take() == "de"
    assert len(harness.open) == 3


def test_tenants_get_the_same_tokens_and_each_its_own_sweep() -> None:
    harness = Harness(6)
    harness.feed("aabbcc", tenant="large")
    harness.feed("ddeeff", tenant="large")
    harness.feed("ax", tenant="small")
    assert harness.take() == "aaaxbb"
    assert [request_id[:5] for request_id in harness.open].count("small") == 2


def test_a_tenant_of_long_prompts_has_fewer_of_them_in_the_engine() -> None:
    harness = Harness(8)
    long = make_feed("long")
    harness.window.join(long)
    long.offer(prompts(["l" * 29, "l" * 30, "l" * 31], max_tokens=1), is_last=True)
    harness.feed("abcdefghijklmnop", tenant="short")  # 2 tokens each with the one of output
    harness.take()
    assert sum(request_id.startswith("short") for request_id in harness.open) == 7


def test_the_better_priority_goes_first_whichever_tenant_has_it() -> None:
    harness = Harness(1)
    harness.feed("ab", priority=5)
    harness.feed("yz", priority=0, tenant="other")
    assert harness.run() == "yzab"
    assert harness.ranks == {"othery": 0, "otherz": 0, "ta": 5, "tb": 5}


def test_a_priority_that_waits_gets_a_turn_as_if_it_were_the_best() -> None:
    harness = Harness(1)
    harness.feed("abcdefgh", priority=0)
    harness.feed("xyz", priority=2)
    assert harness.take() == "a"
    order = ""
    for _ in range(6):
        harness.clock.now_s += AGEING_S / 2
        harness.end()
        order += harness.take()
    assert order == "bcdxye"  # after two steps of waiting, for the time of one
    assert harness.ranks["tx"] == 0


def test_a_turn_does_not_pass_unused_while_the_engine_is_full() -> None:
    harness = Harness(1)
    harness.feed("abcdefgh", priority=0)
    harness.feed("xyz", priority=2)
    order = harness.take()
    for _ in range(6):
        harness.clock.now_s += (
            1.6 * AGEING_S
        )  # room comes so rarely that no moment of it lies within the turn's own time
        harness.end()
        order += harness.take()
    assert order == "abxcdye"


def test_nobody_overtakes_in_the_engine_whoever_has_aged_as_far() -> None:
    harness = Harness(10)
    harness.feed("x", priority=3)
    assert harness.take() == "x"
    urgent = harness.feed("a", priority=1, is_last=False)
    assert harness.take() == "a"
    harness.clock.now_s += 2 * AGEING_S
    urgent.offer(prompts("b", of="t"), is_last=True)
    assert harness.take() == "b"
    assert harness.ranks == {"tx": 3, "ta": 1, "tb": 3}
    harness.end(3)
    harness.feed("c", priority=1)
    harness.take()
    assert harness.ranks["tc"] == 1


def test_the_sweep_waits_for_its_next_prompt_while_the_engine_has_enough() -> None:
    harness = Harness(8)  # a quarter of which is enough
    reading = harness.feed("ab", is_last=False)
    harness.feed("cdefgh")
    assert harness.take() == "ab"
    reading.offer(prompts("c", of="u"), is_last=True)
    assert harness.take() == "ccdefg"


def test_an_engine_that_would_run_out_of_work_gets_what_there_is() -> None:
    harness = Harness(8)
    harness.feed("a", is_last=False)
    harness.feed("cdefgh")
    assert harness.take() == "ac"  # "a" might go on with "b"
    harness.end()
    assert harness.take() == "d"


def test_a_shard_whose_first_lines_are_being_read_holds_up_nobody() -> None:
    harness = Harness(8)
    harness.feed("", is_last=False)
    harness.feed("abcdefgh")
    assert harness.take() == "abcdefgh"


def test_a_feed_that_leaves_takes_its_waiting_prompts_with_it() -> None:
    harness = Harness(1)
    feed = harness.feed("abc")
    harness.take()
    harness.window.leave(feed)
    assert not harness.window.has_waiting
    assert harness.run() == ""


def test_a_feed_asks_once_for_more_before_it_runs_dry() -> None:
    calls: list[None] = []
    feed = PromptFeed("t", 5, on_outputs=lambda _: None, on_low=lambda: calls.append(None))
    harness = Harness(100)
    harness.window.join(feed)
    feed.offer(prompts(sorted(f"{n:02}" for n in range(2 * LOW_WATER))), is_last=False)
    assert not feed.is_low
    harness.take()
    assert (len(calls), feed.is_low) == (1, True)


def test_an_embedding_request_takes_the_room_of_all_its_inputs() -> None:
    window = AdmissionWindow(10, ageing_s=AGEING_S)
    feed = make_feed()
    window.join(feed)
    requests = [EmbeddingRequest(str(number), ((1, 2), (3,), (4,), (5,))) for number in range(5)]
    feed.offer([((b"a",), request) for request in requests], is_last=True)
    assert [request.request_id for request, _ in window.take()] == ["0", "1", "2"]  # 8 inputs leave room
    window.end("0")
    assert [request.request_id for request, _ in window.take()] == ["3"]


def test_a_request_takes_the_room_of_all_its_choices() -> None:
    window = AdmissionWindow(10, ageing_s=AGEING_S)
    feed = make_feed()
    window.join(feed)
    params = SamplingParams(n=4)
    feed.offer([((b"a",), Request(str(number), (1,), params)) for number in range(5)], is_last=True)
    assert [request.request_id for request, _ in window.take()] == ["0", "1", "2"]
    window.end("0")
    assert [request.request_id for request, _ in window.take()] == ["3"]


@pytest.mark.parametrize(
    ("request_", "room"),
    [
        (Request("r", [1, 2], SamplingParams()), 1),
        (Request("r", [1, 2], SamplingParams(n=3)), 3),
        (Request("r", [1, 2], SamplingParams(n=3), continuations=((1,), (2, 3))), 5),
        (EmbeddingRequest("r", [[1], [2, 3]]), 2),
    ],
)
def test_a_request_takes_the_room_of_its_sequences(request_: AnyRequest, room: int) -> None:
    assert request_room(request_) == room
