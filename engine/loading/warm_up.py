"""Running steps before there is any request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.checkpoint.model_config import ModelConfig
from engine.execution.batch_staging import BatchStaging
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.forward_result import ForwardResult
from engine.execution.plan_batch import plan_batch
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.loading.warm_up_step import WarmUpStep
from engine.loading.warm_up_steps import compiling_steps, largest_steps
from engine.models.decoder_model import DecoderModel
from engine.prompt_logprobs import PromptLogprobs
from engine.prompt_scorer import PromptScorer
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_row import SamplingRow
from engine.sampling.token_counts import TokenCounts
from engine.sampling_params import SamplingParams
from kernels.dispatch import launch_class_of
from kernels.interface import StepShape
from settings import EngineSettings

WARM_UP_BLOCKS = 2  # the null block, and one that holds every key of every row
PENALISED_TOKENS = 1024  # distinct ones of a row; each takes 20 bytes in each of two buffers
GREEDY = SamplingParams(temperature=0.0)
# Every operation of the sampler, and what it keeps: the raw log-probabilities of all rows.
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5, prompt_logprobs=20
)


class WarmUp:
    """Runs steps over a KV cache of its own, as a job would: forward pass, scoring of prompts, sampling.

    What they answer is thrown away; it is not looked at either, since keys of all rows lie on top of each other.
    """

    def __init__(
        self, model: DecoderModel, kv_cache: KVCacheTensors, settings: EngineSettings, max_model_len: int
    ) -> None:
        """kv_cache: WARM_UP_BLOCKS blocks. max_model_len: most tokens of a row."""
        self._model = model
        self.kv_cache = kv_cache
        self._settings = settings
        self._max_model_len = max_model_len
        self._staging = BatchStaging(model.device)
        self._sampler = Sampler(model.ops, model.device)
        self._scorer = PromptScorer(model)

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self._model.config

    def run_largest(self) -> None:
        """The steps that take the most memory, sampled and scored with everything that can be asked for."""
        for step in largest_steps(self._settings, self._max_model_len):
            result = self._run(step)
            self._score(result.hidden)
            for _ in range(2):  # what it sends is staged in two buffers by turns
                self._sample(result.logits, EVERYTHING)

    def run_compiling(self) -> None:
        """One step of each kind that compiles kernels of its own, where kernels are compiled at all."""
        launch_class = launch_class_of(self._model.ops, self._shape())
        if launch_class is None:
            return
        for step in compiling_steps(self._settings, self._max_model_len, launch_class):
            logits = self._run(step).logits
        # Draws have kernels for any number of rows; greedy choices have others for few and for many.
        self._sample(logits[:1], GREEDY)
        self._sample(self._run(largest_steps(self._settings, self._max_model_len)[-1]).logits, GREEDY)

    def replay(self, graphs: DecodeGraphs) -> None:
        """The largest captured step at full length, twice: its inputs are staged in two buffers by turns."""
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
        return self._model.forward(self._staging.stage(plan_batch(items, self._block_size, gates)), self.kv_cache)

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
            # All of them are held to grammars. Where only some are, their logits are copied; with raw log-probabilities
            # those are three tensors of all logits at once, as many as log_softmax has.
            masks = np.arange(num_rows), np.zeros((num_rows, vocab_size), np.bool_)
            self._sampler.sample_masked(logits, rows, masks, {})

    def _shape(self) -> StepShape:
        config, moe = self._model.config, self._model.config.moe
        sizes = (config.hidden_size, config.intermediate_size, self._model.dtype.itemsize)
        if moe is None:
            return StepShape(*sizes)
        bucketed = self._settings.moe.bucketed_min_tokens if self._settings.moe.bucketed else None
        return StepShape(*sizes, moe.num_experts, moe.experts_per_token, moe.intermediate_size, bucketed)


def _always(_num_rows: int, _num_tokens: int) -> bool:
    return True
