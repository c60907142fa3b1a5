"""Decode steps over static buffers and eagerly: the same answers, the same KV."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from structlog.testing import capture_logs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.engine import Engine
from engine.errors import CapabilityError
from engine.model_interface import DecodeItem
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.staging import CpuStream
from engine.stats import DecodeGraphStats
from tests.support.engines import (
    OpenEngine,
    StaticRun,
    StaticRunner,
    greedy_request,
    load_engine,
    load_static_engine,
    logits_of,
    run_all,
    tokens_of,
)
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_families import Family

MAX_MODEL_LEN = 48
PROMPT_LENS = {"a": 5, "b": 17, "c": 30, "d": 1, "e": 41}


class Pair:
    """An engine over static buffers and an eager one, driven alike; each decode step's logits are compared."""

    def __init__(self, checkpoint: Path) -> None:
        options = {"engine.max_model_len": str(MAX_MODEL_LEN), "engine.kv_cache.num_blocks": "24"}
        self.backend = StaticRunner()
        self.static = load_static_engine(checkpoint, self.backend, options)
        self.eager = load_engine(checkpoint, options)
        self._lens: dict[str, int] = {}
        self._rng = random.Random(0)

    def prefill(self, *names: str) -> None:
        for name in names:
            prompt = [self._rng.randrange(256) for _ in range(PROMPT_LENS[name])]
            for engine in (self.static, self.eager):
                engine.model_interface.prefill(name, prompt)
            self._lens[name] = len(prompt)

    def decode(self, *names: str) -> None:
        items = [DecodeItem(name, self._rng.randrange(256), self._lens[name]) for name in names]
        static, eager = (e.model_interface.decode_batch(items, full_logits=True) for e in (self.static, self.eager))
        is_padded = len(names) not in (1, 2, 4, 8)
        for found, expected in zip(map(logits_of, static), map(logits_of, eager), strict=True):
            if not is_padded:
                assert torch.equal(found, expected)
            else:  # other rows in a product: other blocking, other rounding
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
                assert found.argmax() == expected.argmax()
        self._check_caches()
        if is_padded and self.eager.model.config.moe is not None:
            # Padding is routed too, and an expert with other rows rounds otherwise. Later steps must again have equal
            # bits.
            for mine, theirs in zip(_caches(self.static), _caches(self.eager), strict=True):
                mine.copy_(theirs)
        for name in names:
            self._lens[name] += 1

    def _check_caches(self) -> None:
        for mine, theirs in zip(_caches(self.static), _caches(self.eager), strict=True):
            torch.testing.assert_close(mine[1:], theirs[1:], rtol=1e-5, atol=1e-5)  # block 0 is the null block

    def release(self, *names: str) -> None:
        for name in names:
            for engine in (self.static, self.eager):
                engine.model_interface.release(name)


@pytest.fixture(scope="module", params=get_args(Family))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs") / "tiny", request.param)


def _caches(engine: OpenEngine) -> list[torch.Tensor]:
    kv_cache = engine.parts.executor.kv_cache
    return [*kv_cache.keys, *kv_cache.values]


def _stats(engine: Engine) -> DecodeGraphStats:
    stats = engine.model_interface.status().decode_graphs
    assert stats is not None
    return stats


def test_logits_and_kv_are_those_of_eager_steps_as_batches_change(checkpoint: Path) -> None:
    pair = Pair(checkpoint)
    pair.backend.replays.clear()
    pair.prefill("a", "b", "c", "d")
    pair.decode("a", "b", "c", "d")
    pair.decode("c", "a", "b")  # three rows after four, in a graph of four
    pair.release("b")
    pair.decode("a", "c")
    pair.prefill("e")
    for _ in range(MAX_MODEL_LEN - PROMPT_LENS["e"]):  # e comes to its last position
        pair.decode("e", "d", "c")
    pair.release("e", "a")
    pair.prefill("b", "a")
    pair.decode("a", "b", "c", "d")
    pair.decode("d")
    assert pair.backend.sizes[1:] == [4, 4, 2, *[4] * 7, 4, 1]  # the first: a prompt of one token is a decode row
    assert max(pair.backend.replays)[0] == MAX_MODEL_LEN
    for mine, theirs in zip(_caches(pair.static), _caches(pair.eager), strict=True):
        torch.testing.assert_close(mine[1:], theirs[1:], rtol=1e-5, atol=1e-5)  # block 0 is the null block
        assert not (mine[1:] == 0).all()


def test_padding_writes_to_the_first_slot_of_the_null_block_alone(moe_checkpoint: Path) -> None:
    engine = load_static_engine(moe_checkpoint, StaticRunner(), batch_sizes=(8,))
    caches = _caches(engine)
    for cache in caches:
        cache.fill_(7.0)
    engine.model_interface.prefill("a", [1, 2, 3])
    before = [cache.clone() for cache in caches]
    engine.model_interface.decode_batch([DecodeItem("a", 4, 3)])
    for cache, copy in zip(caches, before, strict=True):
        changed = (cache != copy).flatten(2).any(2).nonzero().tolist()
        block = next(place[0] for place in changed if place[0])
        assert changed == [[0, 0], [block, 3]]


def test_sizes_are_captured_once_largest_first_bound_by_the_longest_row(moe_checkpoint: Path) -> None:
    backend = StaticRunner()
    engine = load_static_engine(moe_checkpoint, backend, {"engine.max_model_len": "50"}, batch_sizes=(4, 1, 8, 2))
    engine.model_interface.prepare("a", 10)  # warms up again
    assert backend.captures == [(50,) * 8, (50,) * 4, (50,) * 2, (50,)]
    assert _stats(engine).captured_sizes == (1, 2, 4, 8)
    assert engine.model_interface.capabilities().cuda_graphs


def test_rows_that_are_long_have_graphs_of_their_own(moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.decode_graphs.SHORT_ROW_TOKENS", 20)
    backend = StaticRunner()
    engine = load_static_engine(moe_checkpoint, backend, {"engine.max_model_len": "50"}, batch_sizes=(1, 2, 3, 6))
    kinds = [(len(bounds), bounds[0]) for bounds in backend.captures]
    assert kinds == [(6, 50), (6, 20), (3, 20), (2, 50), (2, 20), (1, 50), (1, 20)]
    requests = [greedy_request(str(i), [i, *range(2 + 9 * (i == 1))], 12) for i in range(3)]
    assert _tokens(engine, requests) == _tokens(load_engine(moe_checkpoint), requests)
    found = list(zip(backend.sizes, backend.bounds, strict=True))
    assert {(3, 20), (6, 50)} <= set(found)  # three rows: first all of them short, then one of them long
    assert all(max(lens) <= bound for lens, bound in zip(backend.replays, backend.bounds, strict=True))


def test_a_size_not_captured_runs_in_a_larger_graph_or_eagerly(
    moe_checkpoint: Path,
) -> None:
    requests = [greedy_request(str(i), [i, 1, 2], 6) for i in range(8)]
    expected = run_all(load_engine(moe_checkpoint), requests)
    backend = StaticRunner(failing=(4, 8))
    with capture_logs() as logs:
        engine = load_static_engine(moe_checkpoint, backend)
    failed = [event["batch_size"] for event in logs if event["event"] == "decode_graph_capture_failed"]
    assert failed == [8, 4]
    engine_of_all = load_static_engine(moe_checkpoint, StaticRunner(failing=(2, 4)))
    for found in (run_all(engine, requests), run_all(engine_of_all, requests)):
        assert {name: tokens_of(output) for name, output in found.items()} == {
            name: tokens_of(output) for name, output in expected.items()
        }
    stats = _stats(engine)
    assert (stats.captured_sizes, stats.failed_sizes) == ((1, 2), (4, 8))
    assert (stats.num_replays, stats.num_eager_decode_steps) == (len(backend.sizes), 5)
    assert len(backend.captures) == 4
    run_all(engine_of_all, [greedy_request(str(i), [i, 3, 4], 6) for i in range(3)])
    assert _stats(engine_of_all).num_eager_decode_steps == 0


def test_memory_that_is_short_for_a_graph_stops_the_start(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StaticRunner, "capture", run_out)
    with pytest.raises(CapabilityError, match=r"out of memory for the decode graphs.*lower engine\."):
        load_static_engine(moe_checkpoint, StaticRunner())


def test_graphs_live_as_long_as_the_model_whatever_is_released(moe_checkpoint: Path) -> None:
    backend = StaticRunner()
    engine = load_static_engine(moe_checkpoint, backend)
    graphs = [weakref.ref(run) for run in backend.runs]
    backend.runs.clear()
    run_all(engine, [greedy_request("a", [1, 2], 3)])
    engine.model_interface.prefill("b", [1, 2])
    engine.model_interface.release("b")
    engine.model_interface.prefill("c", [1, 2])
    engine.model_interface.reset()
    engine.close()
    gc.collect()
    assert all(graph() is not None for graph in graphs)


def test_logits_that_were_handed_out_are_not_written_by_a_later_step(moe_checkpoint: Path) -> None:
    interface = load_static_engine(moe_checkpoint, StaticRunner(), {"engine.decode.batched": "off"}).model_interface
    expected = load_engine(moe_checkpoint, {"engine.decode.batched": "off"}).model_interface
    results = []
    for one in (interface, expected):
        for name in ("a", "b"):
            one.prefill(name, [ord(name), 2])
        items = [DecodeItem("a", 3, 2), DecodeItem("b", 9, 2)]
        results.append([logits_of(result) for result in one.decode_batch(items, full_logits=True)])
        one.decode("a", 5, 3)
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def test_steps_that_are_profiled_run_eagerly(moe_checkpoint: Path) -> None:
    backend = StaticRunner()
    options = {"engine.profile.layers": "on", "engine.profile.every_steps": "2"}
    engine = load_static_engine(moe_checkpoint, backend, options)
    backend.replays.clear()
    with capture_logs() as logs:
        run_all(engine, [greedy_request("a", [1, 2, 3], 9)])
    profiled = [event["num_tokens"] for event in logs if event["event"] == "layer_profile"]
    assert (len(backend.sizes), profiled) == (4, [1] * 4)


TRUNCATIONS: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9}]


def _workload(seed: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, some with the same beginning, and 10 to 24 new tokens: greedy, drawn and truncated."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(256) for _ in range(32)] for _ in range(3)]
    requests = []
    for i in range(11):
        beginning = rng.choice(beginnings) if rng.random() < 0.5 else []
        prompt = [*beginning, *(rng.randrange(256) for _ in range(rng.randrange(1, 29)))]
        params = SamplingParams(rng.randrange(10, 25), temperature=rng.choice([0.0, 0.8]), seed=i, ignore_eos=True)
        requests.append(Request(str(i), tuple(prompt), replace(params, **[{}, *TRUNCATIONS][i % 5])))
    return requests


def _tokens(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    return {name: tokens_of(output) for name, output in run_all(engine, requests).items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine.kv_cache.num_blocks": "12", "engine.max_model_len": "128"},
        {"engine.prefix_cache.enabled": "off", "engine.unified_prefill": "off", "engine.max_num_batched_tokens": "64"},
        {"engine.async_scheduling": "on"},
    ],
    ids=["together", "preempted", "apart", "ahead"],
)
def test_the_engine_gives_the_tokens_of_eager_steps(moe_checkpoint: Path, options: dict[str, str]) -> None:
    requests = _workload(len(options))
    backend = StaticRunner()
    static = load_static_engine(moe_checkpoint, backend, options)
    assert _tokens(static, requests) == _tokens(load_engine(moe_checkpoint, options), requests)
    assert {4, 8} <= set(backend.sizes)
    assert all(list(lens) == sorted(lens, reverse=True) for lens in backend.replays)  # the longest row first
    if "engine.kv_cache.num_blocks" in options:
        assert static.stats().num_preemptions > 0


CHUNK_SIZES = (8, 24, 40, 64)
CHUNK_OPTIONS: dict[str, dict[str, str]] = {
    "together": {},
    "ahead": {"engine.async_scheduling": "on"},
    "preempted": {"engine.kv_cache.num_blocks": "12", "engine.max_model_len": "128"},
    "narrow": {
        "engine.prefix_cache.enabled": "off",
        "engine.max_num_batched_tokens": "40",
        "engine.max_num_seqs": "6",
    },
}
# What differs in a captured step: experts, windows beside layers that see all, scores that are capped, sinks. What else
# families differ in is the same code in every step.
UNLIKE: tuple[Family, ...] = ("qwen3", "qwen3_moe", "gemma2", "gpt_oss")


def _workloads_with_chunks() -> list[pytest.ParameterSet]:
    """(family, options, seed) of each workload, in the order of families, whose checkpoints are kept one at a time."""
    return [
        pytest.param(family, options, seed, id=f"{family}-{name}-{seed}", marks=() if is_quick else pytest.mark.slow)
        for family in get_args(Family)
        for name, options in CHUNK_OPTIONS.items()
        for seed in (0, 1, 2)
        for is_quick in [seed == 0 and (family in UNLIKE or name == "together")]
    ]


@pytest.mark.parametrize(("checkpoint", "options", "seed"), _workloads_with_chunks(), indirect=["checkpoint"])
def test_steps_with_chunks_leave_the_tokens_and_kv_of_eager_ones(
    checkpoint: Path, options: dict[str, str], seed: int
) -> None:
    given = {"engine.max_num_batched_tokens": "64", "engine.shared_prefix.enabled": "off", **options}
    requests = _workload(seed)
    backend = StaticRunner()
    static = load_static_engine(checkpoint, backend, given, batch_sizes=(4, 12), chunk_sizes=CHUNK_SIZES)
    eager = load_engine(checkpoint, given)
    assert _tokens(static, requests) == _tokens(eager, requests)
    for mine, theirs in zip(_caches(static), _caches(eager), strict=True):
        torch.testing.assert_close(mine[1:], theirs[1:], rtol=1e-4, atol=1e-4)  # block 0 is the null block
    stats = _stats(static)
    assert stats.captured_chunk_tokens == CHUNK_SIZES
    assert stats.num_chunk_replays >= 3
    assert stats.num_replays == len(backend.replays) > stats.num_chunk_replays


def test_a_step_with_more_chunks_or_tokens_than_any_graph_runs_eagerly(moe_checkpoint: Path) -> None:
    options = {"engine.shared_prefix.enabled": "off", "engine.prefix_cache.enabled": "off"}
    engine = load_static_engine(moe_checkpoint, StaticRunner(), options, chunk_sizes=(8, 32))
    for chunks, num_replays in (([2] * 4, 1), ([2] * 5, 0), ([9, 20], 1), ([9, 24], 0)):
        before = _stats(engine).num_chunk_replays
        for i, length in enumerate(chunks):
            engine.add_request(greedy_request(f"{chunks} {i}", range(40 + i, 40 + i + length), 1))
        while engine.has_unfinished():
            engine.step()
        assert _stats(engine).num_chunk_replays - before == num_replays


def test_hidden_states_of_prompts_are_computed_eagerly(moe_checkpoint: Path) -> None:
    engine = load_static_engine(
        moe_checkpoint, StaticRunner(), {"engine.shared_prefix.enabled": "off"}, chunk_sizes=(64,)
    )
    scored = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    requests = [Request("scored", tuple(range(9)), scored), greedy_request("plain", range(20, 30), 2)]
    assert _tokens(engine, requests) == _tokens(load_engine(moe_checkpoint), requests)
    assert _stats(engine).num_chunk_replays == 0


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Counts the operations that make a tensor with memory of its own, except in functions that it passes over."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.names: list[str] = []
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            known = set(_addresses((args, kwargs)))
            self.names += [str(func) for address in _addresses(result) if address not in known]
        return result

    def passing_over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._is_paused = True
            try:
                return function(*args)
            finally:
                self._is_paused = False

        return run


def _addresses(values: object) -> list[int]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [leaf.untyped_storage().data_ptr() for leaf in leaves]


@pytest.mark.parametrize("runs_ahead", ["on", "off"])
def test_a_replayed_step_allocates_nothing(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, runs_ahead: str
) -> None:
    """Passed over: what a graph runs, with memory of its own, and the copy of the answers, in memory of the host."""
    backend, counted = StaticRunner(), Allocations()
    engine = load_static_engine(moe_checkpoint, backend, {"engine.async_scheduling": runs_ahead})
    for i, drawn in enumerate(({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, **TRUNCATIONS[-1]})):
        engine.add_request(Request(str(i), (5, i), SamplingParams(9, seed=i, ignore_eos=True, **drawn)))
    for _ in range(3):
        engine.step()
    for owner, name in ((StaticRun, "__call__"), (CpuStream, "copy_back")):
        monkeypatch.setattr(owner, name, counted.passing_over(getattr(owner, name)))
    with counted:
        for _ in range(4):
            engine.step()
    assert backend.sizes[-4:] == [4] * 4
    assert counted.names == []


def test_truncated_rows_are_drawn_by_the_graph(moe_checkpoint: Path) -> None:
    drawn = SamplingParams(max_tokens=9, temperature=1.5, seed=3, ignore_eos=True)
    requests = [Request(str(i), (5, i), replace(drawn, **some)) for i, some in enumerate(TRUNCATIONS)]
    backend = StaticRunner()
    tokens = _tokens(load_static_engine(moe_checkpoint, backend), requests)
    assert len(backend.sizes) >= 8 > backend.num_followed == 1  # in the warm-up
    assert tokens == _tokens(load_engine(moe_checkpoint), requests)
    whole = _tokens(load_engine(moe_checkpoint), [replace(request, params=drawn) for request in requests])
    assert all(tokens[name] != whole[name] for name in tokens)


def test_rows_that_ask_for_more_than_a_draw_get_it_after_a_replay(moe_checkpoint: Path) -> None:
    params = [
        SamplingParams(max_tokens=7, temperature=0.0, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.9, seed=3, top_k=5, logit_bias={7: 1.0}, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.9, seed=4, ignore_eos=True),
    ]
    requests = [Request(str(i), (5, i), one) for i, one in enumerate(params)]
    for options in ({}, {"engine.async_scheduling": "on"}):
        backend = StaticRunner()
        static = load_static_engine(moe_checkpoint, backend, options)
        assert _tokens(static, requests) == _tokens(load_engine(moe_checkpoint), requests)
        assert len(backend.sizes) >= 8  # the last steps, of one row, are chosen by the graph
        assert 0 < backend.num_followed < len(backend.sizes)  # which keeps no logits then


def test_a_trace_of_tokens_is_that_of_eager_steps(moe_checkpoint: Path) -> None:
    def traced(engine: Engine) -> list[Any]:
        with capture_logs() as logs:
            run_all(engine, [greedy_request(str(i), [i, 1, 2], 4) for i in range(2)])
        return [event["token_ids"] for event in logs if event["event"] == "candidates"]

    backend, options = StaticRunner(), {"engine.trace_tokens": "true"}
    static = load_static_engine(moe_checkpoint, backend, options)
    backend.replays.clear()
    assert traced(static) == traced(load_engine(moe_checkpoint, options))
    assert len(backend.replays) >= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_replayed_graphs_give_the_tokens_of_eager_steps(checkpoint: Path) -> None:
    def run(enabled: str) -> tuple[dict[str, list[int]], DecodeGraphStats | None]:
        options = {"engine.device": "cuda", "engine.cuda_graphs.enabled": enabled, "engine.max_num_seqs": "12"}
        engine = load_engine(checkpoint, options)
        return _tokens(engine, _workload(7)), engine.model_interface.status().decode_graphs

    found, stats = run("on")
    assert (found, None) == run("off")
    assert stats is not None
    assert (stats.captured_sizes, stats.failed_sizes) == ((1, 2, 4, 8, 12), ())
    assert stats.num_replays > 0
    assert stats.num_eager_decode_steps == 0
