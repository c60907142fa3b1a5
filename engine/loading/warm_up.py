"""Runs steps before the first request, so that kernels are compiled and the memory of the largest step is measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import structlog
import torch

from engine.execution.batch import ForwardItem, plan_batch
from engine.execution.decode_graphs import DecodeGraphs
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from engine.loading.derived_settings import usable_cores
from engine.loading.kv_pool import DeviceMemory, expected_step_bytes
from engine.model_status import MemoryProfile
from engine.models.decoder import DecoderModel, ForwardResult, weights_bytes
from engine.out_of_memory import STEP_SETTINGS, naming_settings
from engine.prompt_logprobs import PromptScorer
from engine.request import PromptLogprobs
from engine.sampler import Sampler, SamplingRow
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import TokenCounts
from engine.staging import ArrayStaging
from kernels.dispatch import compile_ahead_of, launch_class_of
from kernels.interface import StepShape
from settings import EngineSettings

WARM_UP_BLOCKS = 2  # the null block, and one that holds every key of every row
PENALISED_TOKENS = 1024  # distinct ones of a row; each takes 20 bytes in each of two buffers
GREEDY = SamplingParams(temperature=0.0)
TRUNCATED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
# Every operation of the sampler, and what it keeps: the raw log-probabilities of all rows.
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5, prompt_logprobs=20
)

# Steps of more tokens have no kernels of their own: the last bound is 128 rows an expert, 8,192 tokens of 512 experts
# with 8 choices.
MOST_CLASSIFIED_TOKENS = 16_384

MakeGraphs = Callable[[KVCacheTensors], DecodeGraphs | None]

_log = structlog.get_logger(__name__)


class WarmUp:
    """Runs steps over a KV cache of its own, as a job would: forward pass, scoring of prompts, sampling.

    The answers are thrown away unread: the keys of all rows lie on top of each other.
    """

    def __init__(
        self, model: DecoderModel, kv_cache: KVCacheTensors, settings: EngineSettings, max_model_len: int
    ) -> None:
        """kv_cache: WARM_UP_BLOCKS blocks. max_model_len: most tokens of a row."""
        self._model = model
        self.kv_cache = kv_cache
        self._settings = settings
        self._max_model_len = max_model_len
        self._staging = ArrayStaging(model.device)
        self._sampler = Sampler(model.ops, model.device)
        self._scorer = PromptScorer(model)

    def compile_ahead(self) -> None:
        """Compile the kernels of all steps below in a process a core, where kernels are compiled at all: one after the
        other they take minutes.
        """
        compile_ahead = compile_ahead_of(self._model.ops)
        if compile_ahead is None:
            return
        started_s = time.monotonic()
        compiled = compile_ahead(self._run_all, usable_cores())
        log = _log.warning if compiled.failures else _log.info
        log("kernels_compiled", **asdict(compiled), seconds=round(time.monotonic() - started_s, 1))

    def _run_all(self) -> None:
        self.run_largest()
        self.run_compiling()

    def run_largest(self) -> None:
        """Run the steps that take the most memory, sampled and scored with everything that can be asked for."""
        for step in largest_steps(self._settings, self._max_model_len):
            result = self._run(step)
            self._score(result.hidden)
            for _ in range(2):  # what it sends is staged in two buffers by turns
                self._sample(result.logits, EVERYTHING)

    def run_compiling(self) -> None:
        """Run a step of each kind that has kernels of its own, where kernels are compiled at all."""
        launch_class = launch_class_of(self._model.ops, self._shape())
        if launch_class is None:
            return
        for step in compiling_steps(self._settings, self._max_model_len, launch_class):
            logits = self._run(step).logits
        # Choices have the same kernels for any number of rows and any temperature: among logits as they are and edited
        # ones, truncated (edited ones by EVERYTHING) and not.
        for row in (None, SamplingRow(TRUNCATED, 1, seed=0)):
            self._sampler.sample(logits[:1], [row] * logits[:1].shape[0])
        self._sample(logits[:1], GREEDY)

    def replay(self, graphs: DecodeGraphs) -> None:
        """Replay the largest captured step at full length, twice: its inputs are staged in two buffers by turns."""
        rows = max(graphs.stats().captured_sizes, default=0)
        for _ in range(2 if rows else 0):
            items = WarmUpStep(((1, self._max_model_len),) * rows).items(self._block_size, generates=True)
            graphs.replay(plan_batch(items, self._block_size))

    @property
    def _block_size(self) -> int:
        return self.kv_cache.spec.block_size

    def _run(self, step: WarmUpStep) -> ForwardResult:
        items = step.items(self._block_size, generates=self._model.lm_head is not None)
        gates = (_always, _always) if step.shares_prefix else None
        planned = plan_batch(items, self._block_size, gates)
        return self._model.forward(planned.on_device(self._staging.send(planned.arrays)), self.kv_cache)

    def _score(self, hidden: Sequence[torch.Tensor]) -> None:
        if self._model.lm_head is None:
            return
        num_top = EVERYTHING.prompt_logprobs or 0
        self._scorer.score([(PromptLogprobs([0] * (rows.shape[0] + 1), num_top), 0, rows) for rows in hidden])

    def _sample(self, logits: torch.Tensor, params: SamplingParams) -> None:
        if logits.shape[0]:
            num_rows, vocab_size = logits.shape
            counts = TokenCounts(range(min(PENALISED_TOKENS, vocab_size)))
            rows = [SamplingRow(params, 1, seed, counts) for seed in range(num_rows)]
            # All of them are bound to grammars. Where only some are, their logits are copied; with raw
            # log-probabilities those are three tensors of all logits at once, as many as log_softmax has.
            masks = np.arange(num_rows), np.zeros((num_rows, vocab_size), np.bool_)
            self._sampler.sample_masked(logits, rows, masks, {})

    def _shape(self) -> StepShape:
        config, moe = self._model.config, self._model.config.moe
        sizes = (config.hidden_size, config.intermediate_size, self._model.dtype.itemsize)
        is_quantised = config.quantization is not None or self._settings.quantization != "none"
        if moe is None:
            return StepShape(*sizes, is_quantised=is_quantised)
        bucketed = self._settings.moe.bucketed_min_tokens if self._settings.moe.bucketed else None
        return StepShape(*sizes, moe.num_experts, moe.experts_per_token, bucketed, is_quantised)


def _always(_num_rows: int, _num_tokens: int) -> bool:
    return True


def largest_steps(settings: EngineSettings, max_model_len: int) -> Sequence[WarmUpStep]:
    """Three steps, of which one takes the most memory.

    Decode rows alone, whose full length decides how many parts attention keeps; chunks alone, as few as can be, with
    the hidden states of all their tokens; and both, with logits of as many sequences as can run.
    """
    max_seqs, max_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    decode = [(1, max_model_len)] * max_seqs
    chunks = _chunks(max_tokens, max_seqs, max_model_len)
    mixed_chunks = _chunks(max_tokens - max_seqs + 1, 1, max_model_len)
    mixed = [*decode[1:], *mixed_chunks]
    return [WarmUpStep(tuple(rows)) for rows in (mixed, chunks, decode)]


def compiling_steps(
    settings: EngineSettings, max_model_len: int, launch_class: Callable[[int], Hashable]
) -> Sequence[WarmUpStep]:
    """A step for each kind that has kernels of its own. launch_class: which ones a step's number of tokens asks for.

    Decode rows have their keys in one piece (a row of two tokens is never split) or in parts (one row of full length
    is, if any is), and either alone or beside a chunk, where another kernel stores their keys; rows in groups have
    kernels for 16, 64 and 128 pairs of a query and a head, so groups double.
    """
    max_seqs = settings.max_num_seqs
    decode = [(1, min(2, max_model_len)), (1, max_model_len)]
    steps = [WarmUpStep((row,)) for row in decode]
    if min(max_seqs, max_model_len) >= 2 and settings.max_num_batched_tokens >= 3:
        steps += [WarmUpStep((row, (2, max_model_len))) for row in decode]
    for num_tokens in first_of_each(launch_class, settings.max_num_batched_tokens):
        steps.append(WarmUpStep(tuple(_chunks(num_tokens, max_seqs, max_model_len))))
    if settings.shared_prefix.enabled:
        steps += _shared_prefix_steps(settings, max_model_len)
    return steps


def first_of_each(launch_class: Callable[[int], Hashable], max_tokens: int) -> Sequence[int]:
    """The smallest number of tokens of each class, rising."""
    firsts: dict[Hashable, int] = {}
    for num_tokens in range(1, min(max_tokens, MOST_CLASSIFIED_TOKENS) + 1):
        firsts.setdefault(launch_class(num_tokens), num_tokens)
    return sorted(firsts.values())


def _chunks(num_tokens: int, max_rows: int, max_model_len: int) -> list[tuple[int, int]]:
    """As few chunks as possible of num_tokens in all, each at the end of a sequence of full length; at most max_rows
    chunks, even if these have fewer tokens.
    """
    full, rest = divmod(num_tokens, max_model_len)
    queries = [max_model_len] * full + [rest] * (rest > 0)
    return [(count, max_model_len) for count in queries[:max_rows]]


def _shared_prefix_steps(settings: EngineSettings, max_model_len: int) -> Iterator[WarmUpStep]:
    """Groups of 2, 4, 8 and on of decode rows, of chunks of two and of many tokens, with the longest shared prefix."""
    max_seqs, max_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    num_rows = 2
    while num_rows <= max_seqs:
        for num_queries in dict.fromkeys((1, 2, min(max_tokens // num_rows, max_model_len // 2))):
            if (
                0 < num_queries <= max_tokens // num_rows
                and max_model_len - num_queries >= settings.kv_cache.block_size
            ):
                yield WarmUpStep(((num_queries, max_model_len),) * num_rows, shares_prefix=True)
        num_rows *= 2


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """Rows of a step, and whether they share their prefixes."""

    rows: tuple[tuple[int, int], ...]  # (queries, tokens in KV after the step) of each; 1 query: a decode row
    shares_prefix: bool = False  # all full blocks before the rows' own queries are one group's

    def items(self, block_size: int, *, generates: bool) -> Sequence[ForwardItem]:
        """What to run over a KV cache of two blocks: every key of every row lies in block 1, whatever is there.

        generates: the model has a head, so logits are wanted. Hidden states of all tokens of chunks always are.
        """
        return [
            ForwardItem(
                [0] * num_queries,
                num_tokens - num_queries,
                [1] * -(-num_tokens // block_size),
                wants_logits=generates,
                wants_hidden=num_queries > 1 or not generates,
            )
            for num_queries, num_tokens in self.rows
        ]


def measure_memory(
    model: DecoderModel,
    spec: KVCacheSpec,
    settings: EngineSettings,
    max_model_len: int,
    memory: DeviceMemory,
    make_graphs: MakeGraphs,
) -> MemoryProfile:
    """Run the largest steps and capture the decode graphs over a KV cache of two blocks, and see what they take.

    This compiles all kernels, so that none is compiled in mid-job, and gives back all that it makes. No memory is given
    back between the steps, as in a job later on. Graphs are captured again over the real cache, since they keep its
    address: they take as much again.

    max_model_len: most tokens of a row, before the pool bounds it. Raises CapabilityError where memory runs out.
    """
    kv_cache = KVCacheTensors.allocate(spec, WARM_UP_BLOCKS, model.device)
    warm_up = WarmUp(model, kv_cache, settings, max_model_len)
    expected_bytes = expected_step_bytes(model.config, settings)
    what = f"a step of {settings.max_num_batched_tokens} tokens and {settings.max_num_seqs} sequences"
    with naming_settings(f"{what}, beside the weights", expected_bytes, f"lower {STEP_SETTINGS}"):
        warm_up.compile_ahead()
        activations_bytes = _steps_bytes(warm_up, memory)
    with naming_settings("the decode graphs, beside the weights", expected_bytes, "lower engine.max_num_seqs"):
        graphs_bytes = _graphs_bytes(warm_up, memory, make_graphs)
    del warm_up, kv_cache
    gc.collect()  # objects that refer to each other in a circle
    memory.reset_peak()
    weights = weights_bytes(model)
    rounding_bytes = 2 * spec.num_layers * memory.rounding_bytes  # of keys and values, a tensor a layer each
    return MemoryProfile(
        total_bytes=memory.total_bytes,
        usable_bytes=int(memory.total_bytes * settings.gpu_memory_utilization),
        weights_bytes=weights,
        other_bytes=max(memory.total_bytes - memory.free_bytes() - weights, 0) + rounding_bytes,
        activations_bytes=activations_bytes,
        graphs_bytes=graphs_bytes,
    )


def _steps_bytes(warm_up: WarmUp, memory: DeviceMemory) -> int:
    memory.reset_peak()
    before = memory.peak_bytes()
    warm_up.run_largest()
    warm_up.run_compiling()
    return memory.peak_bytes() - before


def _graphs_bytes(warm_up: WarmUp, memory: DeviceMemory, make_graphs: MakeGraphs) -> int:
    """What the driver has less, since a graph's nodes are no tensors."""
    memory.reset_peak()
    free = memory.free_bytes()
    graphs = make_graphs(warm_up.kv_cache)
    if graphs is None:
        return 0
    graphs.capture_all()
    warm_up.replay(graphs)
    memory.reset_peak()
    return max(free - memory.free_bytes(), 0)


def log_memory_profile(profile: MemoryProfile, spec: KVCacheSpec, settings: EngineSettings) -> None:
    """One event with every part in bytes and the tokens that the pool holds.

    A warning where the pool that was set is larger than what remains for it: steps may then run out of memory.
    """
    num_blocks = settings.kv_cache.num_blocks or 0
    pool_bytes = num_blocks * spec.bytes_per_block
    fits = pool_bytes <= profile.kv_bytes
    log = _log.info if fits else _log.warning
    log(
        "memory_profile",
        **asdict(profile),
        kv_bytes=profile.kv_bytes,
        pool_bytes=pool_bytes,
        pool_blocks=num_blocks,
        pool_tokens=(num_blocks - 1) * spec.block_size,
        fits=fits,
    )
