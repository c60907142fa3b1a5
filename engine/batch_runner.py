"""Runs what the scheduler planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.embedding.embedding_state import EmbeddingState
from engine.errors import EngineError, EngineFatal, NonFiniteLogits
from engine.execution.forward_item import ForwardItem
from engine.execution.step_executor import StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.output_processor import OutputProcessor
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampled_token import SampledToken
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_row import SamplingRow
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_batch import ScheduledBatch
from engine.scheduling.scheduled_item import ScheduledItem
from engine.step_answers import StepAnswers


class BatchRunner:
    """Forward pass and sampling of a step, and the look at whether its KV is good.

    A chunk's last token sees all of its others, so its values tell whether the chunk's KV is good: without that look,
    NaN would be offered to other requests before their own request fails.
    """

    def __init__(
        self,
        executor: StepExecutor,
        runner: ModelRunner,
        blocks: BlockManager,
        outputs: OutputProcessor,
        sampler: Sampler,
    ) -> None:
        self._executor = executor
        self._runner = runner  # is told when a step fails
        self._blocks = blocks
        self._outputs = outputs
        self._sampler = sampler

    def run(self, batch: ScheduledBatch) -> StepAnswers:
        """Run the items.

        Raises EngineFatal for what is no single item's failure: it leaves KV that nobody can vouch for.
        """
        generating = [(item, item.state) for item in batch.items if isinstance(item.state, RequestState)]
        embedding = [(item, item.state) for item in batch.items if isinstance(item.state, EmbeddingState)]
        try:
            result = self._executor.execute([self._forward_item(item) for item in batch.items])
            tokens = self._sample(generating, result.logits)
            are_good = _are_finite(result.hidden)
        except Exception as error:
            self._runner.mark_failed(f"{type(error).__name__}: {error}")
            raise EngineFatal(f"a step failed: {type(error).__name__}: {error}") from error
        checked = zip(embedding, result.hidden, are_good, strict=True)
        return StepAnswers(
            tokens=[(*pair, answer) for pair, answer in zip(generating, tokens, strict=True)],
            hidden=[(*pair, rows if is_good else _not_finite(pair[0])) for pair, rows, is_good in checked],
        )

    def _forward_item(self, item: ScheduledItem) -> ForwardItem:
        state = item.state
        tokens = state.token_ids[item.start : item.start + item.num_scheduled_tokens]
        embeds = isinstance(state, EmbeddingState)
        return ForwardItem(
            tokens,
            item.start,
            self._blocks.block_table(state.sequence_id),
            wants_logits=not embeds,
            wants_hidden=embeds,
            is_final=item.samples,
        )

    def _sample(
        self, generating: Sequence[tuple[ScheduledItem, RequestState]], logits: torch.Tensor
    ) -> Sequence[SampledToken | EngineError | None]:
        """Answers of the items that generate, which have a row of logits [S, V] each."""
        if not generating:
            return []
        rows = [self._sampling_row(state) for item, state in generating if item.samples]
        if len(rows) == len(generating):  # nearly always: the logits, up to 40 MB, are not copied
            return self._sampler.sample(logits, rows)
        items = [item for item, _ in generating]
        samples = torch.tensor([item.samples for item in items], device=logits.device)
        sampled = iter(self._sampler.sample(logits[samples], rows) if rows else [])
        are_good = iter(torch.isfinite(logits[~samples].amax(dim=-1)).tolist())
        return [next(sampled) if item.samples else (None if next(are_good) else _not_finite(item)) for item in items]

    def _sampling_row(self, state: RequestState) -> SamplingRow:
        return SamplingRow(
            params=state.request.params,
            position=len(state.token_ids),
            seed=state.seed,
            counts=state.counts,
            banned_token_ids=self._outputs.banned_token_ids(state),
            matcher=state.matcher,
        )


def _are_finite(hidden: Sequence[torch.Tensor]) -> list[bool]:
    """Whether the last token's hidden states are, of each [n, H]."""
    if not hidden:
        return []
    are_finite: list[bool] = torch.isfinite(torch.stack([rows[-1] for rows in hidden])).all(dim=-1).tolist()
    return are_finite


def _not_finite(item: ScheduledItem) -> NonFiniteLogits:
    end = item.start + item.num_scheduled_tokens
    return NonFiniteLogits(f"the model's values are not finite before position {end}")
