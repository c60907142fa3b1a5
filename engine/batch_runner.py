"""Runs what the scheduler planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.embedding.embedding_state import EmbeddingState
from engine.embedding.pool import pool
from engine.errors import EngineError, NonFiniteLogits
from engine.execution.forward_item import ForwardItem
from engine.execution.step_executor import StepExecutor
from engine.finish_reason import FinishReason
from engine.kv_cache.block_manager import BlockManager
from engine.out_of_memory import step_failure
from engine.output_processor import OutputProcessor
from engine.prompt_scorer import PromptScorer
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampled_token import SampledToken
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_row import SamplingRow
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_batch import ScheduledBatch
from engine.scheduling.scheduled_item import ScheduledItem
from engine.step_answers import StepAnswers, VectorAnswer


class BatchRunner:
    """Forward pass, scoring of prompts, pooling and sampling of a step, and the look at whether its KV is good.

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
        self._scorer = PromptScorer(executor.model)

    def run(self, batch: ScheduledBatch) -> StepAnswers:
        """Run the items.

        Raises EngineFatal for what is no single item's failure: it leaves KV that nobody can vouch for.
        """
        generating = [(item, item.state) for item in batch.items if isinstance(item.state, RequestState)]
        try:
            items = [self._forward_item(item) for item in batch.items]
            result = self._executor.execute(items)
            wanting = [item for item, forward in zip(batch.items, items, strict=True) if forward.wants_hidden]
            hidden = list(zip(wanting, result.hidden, strict=True))
            bad_prompts = self._score(hidden)
            vectors = _pool(hidden)
            tokens = self._sample(generating, result.logits)
        except Exception as error:
            self._runner.mark_failed(f"{type(error).__name__}: {error}")
            raise step_failure(error, self._executor.model.device) from error
        return StepAnswers(
            tokens=[
                (item, state, _not_finite(item) if state.sequence_id in bad_prompts else answer)
                for (item, state), answer in zip(generating, tokens, strict=True)
            ],
            vectors=vectors,
        )

    def _forward_item(self, item: ScheduledItem) -> ForwardItem:
        state = item.state
        return ForwardItem(
            state.token_ids[item.start : item.start + item.num_scheduled_tokens],
            item.start,
            self._blocks.block_table(state.sequence_id),
            wants_logits=state.wants_logits,
            wants_hidden=state.wants_hidden,
            is_final=item.samples,
        )

    def _score(self, hidden: Sequence[tuple[ScheduledItem, torch.Tensor]]) -> set[str]:
        """Fill in log-probabilities of prompts; the ids of the sequences where these are not finite."""
        if not hidden:  # a step that only decodes
            return set()
        scored = [
            (item.state.sequence_id, (item.state.prompt_logprobs, item.start, rows))
            for item, rows in hidden
            if isinstance(item.state, RequestState) and item.state.prompt_logprobs is not None
        ]
        are_good = self._scorer.score([prompt for _, prompt in scored])
        return {sequence_id for (sequence_id, _), is_good in zip(scored, are_good, strict=True) if not is_good}

    def _sample(
        self, generating: Sequence[tuple[ScheduledItem, RequestState]], logits: torch.Tensor
    ) -> Sequence[SampledToken | FinishReason | EngineError | None]:
        """Answers of the items that generate, which have a row of logits [S, V] each."""
        if not generating:
            return []
        draws = [item.samples and state.max_tokens > 0 for item, state in generating]
        rows = [self._sampling_row(state) for (_, state), is_drawn in zip(generating, draws, strict=True) if is_drawn]
        if len(rows) == len(generating):  # nearly always: the logits, up to 40 MB, are not copied
            return self._sampler.sample(logits, rows)
        drawn = torch.tensor(draws, device=logits.device)
        sampled = iter(self._sampler.sample(logits[drawn], rows) if rows else [])
        are_good = iter(torch.isfinite(logits[~drawn].amax(dim=-1)).tolist())
        return [
            next(sampled) if is_drawn else (_undrawn(item) if next(are_good) else _not_finite(item))
            for (item, _), is_drawn in zip(generating, draws, strict=True)
        ]

    def _sampling_row(self, state: RequestState) -> SamplingRow:
        return SamplingRow(
            params=state.request.params,
            position=len(state.token_ids),
            seed=state.seed,
            counts=state.counts,
            banned_token_ids=self._outputs.banned_token_ids(state),
            matcher=state.matcher,
        )


def _pool(hidden: Sequence[tuple[ScheduledItem, torch.Tensor]]) -> list[VectorAnswer]:
    """What the items that are embedded answer."""
    embedded = [(item, item.state, rows) for item, rows in hidden if isinstance(item.state, EmbeddingState)]
    vectors = pool([(state, item.start, rows) for item, state, rows in embedded])
    return [(item, state, vector) for (item, state, _), vector in zip(embedded, vectors, strict=True)]


def _undrawn(item: ScheduledItem) -> FinishReason | None:
    """The answer of a chunk whose KV is good: nothing yet or, behind a prompt that is not to be continued, its end."""
    return FinishReason.LENGTH if item.samples else None


def _not_finite(item: ScheduledItem) -> NonFiniteLogits:
    end = item.start + item.num_scheduled_tokens
    return NonFiniteLogits(f"the model's values are not finite before position {end}")
