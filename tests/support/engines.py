"""Runs requests on engines with small checkpoints, on parts of an engine, and on a scheduler without a model.

Decode graphs run without a GPU here: steps go over the static buffers and nothing is captured. The engine without a
model counts tokens: every token takes the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from engine.encoder import EncoderEngine
from engine.engine import Engine
from engine.execution.decode_graphs import DecodeGraphs, DecodeRun, GraphBackend
from engine.execution.profile import PassTrace
from engine.generation import EngineParts
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.tensors import KVCacheTensors
from engine.loading import load
from engine.model_interface import ErrorResult, ItemResult, LogitsResult, ModelInterface
from engine.models.decoder import DecoderModel
from engine.request import AnyRequest, FinishReason, Request, RequestOutput, ResumeState
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import RequestState
from engine.scheduling.waiting_queue import SchedulerLimits
from settings import EffectiveSettings, EngineSettings, load_settings

MAX_STEPS = 20_000

PROMPT = list(range(40))


class OpenEngine(Engine):
    """An engine that shows its parts: tests spoil weights and KV blocks in them."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self.parts = parts

    @property
    def model(self) -> DecoderModel:
        return self.parts.executor.model

    def spoil(self, sequence_id: str, *, block: int = 0) -> None:
        """Make NaN of the last layer's values in one block of a sequence."""
        block_id = self.parts.block_manager.block_table(sequence_id)[block]
        self.parts.executor.kv_cache.values[-1][block_id] = torch.nan


def load_engine(
    path: Path, overrides: Mapping[str, object] | None = None, pass_trace: PassTrace | None = None
) -> OpenEngine:
    """An engine in float32 on one thread with 400 blocks of 16 tokens, whatever this machine's environment says."""
    values: dict[str, object] = {
        "model.path": str(path),
        "engine.device": "cpu",
        "engine.dtype": "float32",
        "engine.num_threads": "1",
        "engine.kv_cache.num_blocks": "400",
    }
    effective = load_settings(values | dict(overrides or {}), environ={}, dotenv_path=Path(os.devnull))
    return load_decoder_engine(effective, pass_trace)


def load_decoder_engine(effective: EffectiveSettings, pass_trace: PassTrace | None = None) -> OpenEngine:
    """The engine of a decoder, loaded as `load_engine` of the product does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "Engine", OpenEngine)
        engine = load.load_engine(effective, pass_trace)
    assert isinstance(engine, OpenEngine)
    return engine


def greedy_request(request_id: str, prompt: Sequence[int], max_tokens: int = 64) -> Request:
    """A greedy request that only max_tokens ends."""
    return Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def outputs_of(engine: Engine | EncoderEngine, *requests: AnyRequest) -> dict[str, RequestOutput]:
    """Run requests to their ends, one output each."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        steps += 1
        assert steps < MAX_STEPS
    return outputs


def run_all(engine: Engine, requests: Sequence[AnyRequest]) -> dict[str, RequestOutput]:
    """`outputs_of`, with every block free again afterwards."""
    outputs = outputs_of(engine, *requests)
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert outputs.keys() >= {request.request_id for request in requests}
    return outputs


def tokens_of(output: RequestOutput) -> list[int]:
    """Tokens of a request's only completion."""
    assert output.error is None, output.error
    (completion,) = output.completions
    return list(completion.token_ids)


def make_model_interface(checkpoint: Path, **overrides: str) -> ModelInterface:
    """A model interface with 399 usable blocks; overrides are engine settings, `__` for the dots in their names."""
    return load_engine(checkpoint, {f"engine.{k.replace('__', '.')}": v for k, v in overrides.items()}).model_interface


def logits_of(result: ItemResult | None) -> torch.Tensor:
    """The logits [V] of an item that must have them."""
    assert isinstance(result, LogitsResult)
    return result.logits


def error_of(result: ItemResult | None) -> Exception:
    """The error of an item that must have failed."""
    assert isinstance(result, ErrorResult)
    return result.error


class StaticRun:
    """Stands for a captured graph: runs the step again, with the lengths of this replay, which CPU kernels read."""

    def __init__(self, runner: StaticRunner, run: DecodeRun, bound: int) -> None:
        self._runner = runner
        self._run = run
        self._bound = bound

    def __call__(self, kv_lens: tuple[int, ...]) -> None:
        self._runner.replays.append(kv_lens)
        self._runner.bounds.append(self._bound)
        self._run(kv_lens)


class StaticRunner:
    """A GraphBackend that records what is asked of it. `failing`: sizes that cannot be captured."""

    def __init__(self, failing: Collection[int] = ()) -> None:
        self._failing = failing
        self.captures: list[tuple[int, ...]] = []  # bounds of each attempt
        self.runs: list[StaticRun] = []
        self.replays: list[tuple[int, ...]] = []  # lengths of each
        self.bounds: list[int] = []  # of the lengths in each replay
        self.num_followed = 0  # replays behind which the second part ran

    @property
    def sizes(self) -> list[int]:
        """The batch size of each replay."""
        return [len(kv_lens) for kv_lens in self.replays]

    def capture(self, run: DecodeRun, kv_len_bounds: tuple[int, ...]) -> DecodeRun:
        self.captures.append(kv_len_bounds)
        if len(kv_len_bounds) in self._failing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        run(kv_len_bounds)  # as the run before a capture: over padding alone, all of it in the null block
        self.runs.append(StaticRun(self, run, max(kv_len_bounds)))
        return self.runs[-1]

    def capture_after(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def follow() -> None:
            self.num_followed += 1
            run()

        return follow


def load_static_engine(
    path: Path,
    backend: GraphBackend,
    overrides: Mapping[str, object] | None = None,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    chunk_sizes: Sequence[int] = (),
) -> OpenEngine:
    """`load_engine` with graphs of `backend`."""

    def make(model: DecoderModel, kv_cache: KVCacheTensors, _: EngineSettings, max_model_len: int) -> DecodeGraphs:
        return DecodeGraphs(model, kv_cache, backend, batch_sizes, max_model_len, chunk_sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "make_decode_graphs", make)
        return load_engine(path, overrides)


def interrupted(engine: Engine, request: Request, num_tokens: int) -> ResumeState:
    """The request's resume state once its sequences have `num_tokens` tokens each, or have ended with fewer."""
    engine.add_request(request)
    for _ in range(num_tokens):  # the prompt fits one step: a token a step
        assert engine.step() == []
    resume_state = engine.resume_state(request.request_id)
    assert resume_state is not None
    assert engine.abort(request.request_id)
    engine.step()
    return resume_state


def make_request(
    request_id: str, prompt: Sequence[int], *, max_tokens: int = 4, priority: int = 0, n: int = 1
) -> Request:
    """A greedy request that only max_tokens ends."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n)
    return Request(request_id, tuple(prompt), params, priority)


def make_state(request: Request, blocks: BlockManager, arrival: int = 0) -> RequestState:
    """The first sequence of a request."""
    return RequestState(
        request=request,
        index=0,
        arrival=arrival,
        seed=0,
        max_tokens=request.params.max_tokens or 1,
        chain=blocks.new_chain(request.prompt_token_ids, ""),
        token_ids=list(request.prompt_token_ids),
    )


class DryEngine:
    """Runs requests as the engine would, on the same scheduler and the same account of KV blocks, exactly and fast.

    Real: admission, chunks, prefix hits, eviction, preemption. Skipped: the model and the sampler; generated tokens are
    numbers that occur in no prompt and in no other sequence.
    """

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits) -> None:
        self.blocks = blocks
        self.scheduler = Scheduler(limits, blocks)
        self.scheduled_tokens = 0  # the clock
        self.prompt_tokens_run = 0  # prompt positions run, with those repeated after a preemption
        self.num_steps = 0
        self._arrivals = 0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, tenant: str = "") -> RequestState:
        """Queue a request that generates `max_tokens` tokens."""
        self._arrivals += 1
        state = RequestState(
            request=Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), tenant=tenant),
            index=0,
            arrival=self._arrivals,
            seed=0,
            max_tokens=max_tokens,
            chain=self.blocks.new_chain(prompt, tenant),
            token_ids=list(prompt),
        )
        self.scheduler.add(state)
        return state

    def run(self, on_finished: Callable[[RequestState], None] = lambda _: None) -> None:
        """Run until nothing is left; `on_finished` may add more."""
        while self.scheduler.has_work:
            for state in self.step():
                on_finished(state)

    def step(self) -> list[RequestState]:
        """Run one step; the sequences that ended."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self.num_steps += 1
        self.scheduled_tokens += batch.num_tokens
        for item in batch.items:
            end = min(item.start + item.num_scheduled_tokens, item.state.num_prompt_tokens)
            self.prompt_tokens_run += max(end - item.start, 0)
        self.scheduler.commit(batch.items)
        finished: list[RequestState] = []
        for item in batch.items:
            state = item.state
            if not item.samples or not isinstance(state, RequestState):
                continue
            state.token_ids.append(-(state.arrival * 4096 + state.num_output_tokens) - 1)
            if state.num_output_tokens >= state.max_tokens:
                state.finish_reason = FinishReason.LENGTH
                self.scheduler.finish(state)
                finished.append(state)
        return finished
