"""Launches a scheduled step and collects its answers: forward pass, prompt scores, pooling and sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch

from engine.embedding import EmbeddingState, pool
from engine.errors import EngineError, NonFiniteLogits
from engine.execution.batch import ForwardItem, pending_token
from engine.execution.forward import StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.models.classifier import ClassificationHead
from engine.models.decoder import ForwardResult
from engine.out_of_memory import step_failure
from engine.outputs import OutputProcessor
from engine.prompt_logprobs import PromptScorer
from engine.request import FinishReason
from engine.sampler import (
    GREEDY_ROW,
    ChosenTokens,
    Rows,
    SampledToken,
    Sampler,
    SamplingRow,
    VerifiedTokens,
    chosen_plainly,
    plain_draws,
)
from engine.scheduling.scheduler import ScheduledBatch, ScheduledItem
from engine.scheduling.sequence import RequestState, SequenceState
from engine.staging import DeviceStream, HostCopy, PendingResult

if TYPE_CHECKING:
    from array import array  # generic at check time alone

R = TypeVar("R")

# None: not its last chunk. A reason: it ends here without a token.
TokenAnswer = tuple[ScheduledItem, RequestState, SampledToken | VerifiedTokens | FinishReason | EngineError | None]
VectorAnswer = tuple[ScheduledItem, EmbeddingState, "array[float] | EngineError | None"]  # see `pool`


class ModelRunner:
    """Runs a step in two halves: `launch` queues all of its work on the device and waits for nothing, `collect` waits
    for the one copy that brings all of its answers to the host.

    Also checks the KV of each chunk. The last token of a chunk attends to all others, so values that are not finite
    show there; unchecked, other requests would share blocks full of NaN before the request that wrote them fails.
    """

    def __init__(
        self,
        executor: StepExecutor,
        on_failure: Callable[[str], None],
        blocks: BlockManager,
        outputs: OutputProcessor,
        sampler: Sampler,
        stream: DeviceStream,
    ) -> None:
        """on_failure: is told why a step failed."""
        self._executor = executor
        self._on_failure = on_failure
        self._blocks = blocks
        self._outputs = outputs
        self._sampler = sampler
        self._stream = stream
        self._scorer = PromptScorer(executor.model)

    def launch(self, batch: ScheduledBatch, before: StepInFlight | None) -> StepInFlight:
        """Queue the work of a step. before: the step that chooses the tokens which are pending in its items, if any.

        Raises EngineFatal where the step as a whole fails: nobody can vouch for the KV that it leaves.
        """
        with self._failing():
            items, chosen = self._forward_items(batch, before)
            generating = [(item, item.state) for item in batch.items if isinstance(item.state, RequestState)]
            rows = self._sampling_rows(generating)
            draws = plain_draws(rows) if self._executor.chooses_tokens else None
            result = self._executor.execute(items, chosen, draws)
            wanting = [item for item, forward in zip(batch.items, items, strict=True) if forward.wants_hidden]
            hidden = list(zip(wanting, result.hidden, strict=True))
            scores, vectors = self._score(hidden), _pool(hidden, self._executor.model.classifier)
            tokens = self._sample(rows, result) if generating else None
            answers = () if tokens is None else tokens.answers.tensors
            return StepInFlight(
                generating,
                tokens,
                scores,
                vectors,
                self._stream.copy_back((*answers, *scores.tensors, *vectors.tensors)),
                sum(len(item.drafted) for item in batch.items),
            )

    def collect(self, step: StepInFlight) -> StepAnswers:
        """Wait for a step and read its answers; to be called once. Raises EngineFatal as `launch` does."""
        with self._failing():
            on_host = iter(step.copy())
            tokens = [] if step.tokens is None else _read(step.tokens.answers, on_host)
            bad_prompts = _read(step.scores, on_host)
            vectors = _read(step.vectors, on_host)
        return StepAnswers(
            tokens=[
                (item, state, answer)
                if type(answer) is SampledToken and not bad_prompts
                else (item, state, _answer(item, answer, is_bad=state.sequence_id in bad_prompts))
                for (item, state), answer in zip(step.generating, tokens, strict=True)
            ]
            if step.num_drafted == 0
            else _verified(step.generating, iter(tokens), bad_prompts),
            vectors=vectors,
        )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a seam: whatever a step raised, nobody can vouch for its KV
            self._on_failure(f"{type(error).__name__}: {error}")
            raise step_failure(error, self._executor.model.device) from error

    def _forward_items(
        self, batch: ScheduledBatch, before: StepInFlight | None
    ) -> tuple[list[ForwardItem], torch.Tensor | None]:
        """The items, and the tokens that the step before chose, on the device; None where the host knows all tokens."""
        if before is None or before.tokens is None:
            return [self._forward_item(item, None) for item in batch.items], None
        rows: dict[SequenceState, int] = {state: row for row, (_, state) in enumerate(before.generating)}
        items = [
            self._forward_item(item, rows[item.state] if item.start >= len(item.state.token_ids) else None)
            for item in batch.items
        ]
        return items, before.tokens.token_ids

    def _forward_item(self, item: ScheduledItem, row: int | None) -> ForwardItem:
        """row: of the step before, which chooses the item's only token; None: the host knows its tokens."""
        state, start, count, samples, drafted = item
        token_ids = state.token_ids[start : start + count] if row is None else (pending_token(row),)
        return ForwardItem(
            (*token_ids, *drafted) if drafted else token_ids,
            start,
            self._blocks.block_table(state.sequence_id),
            state.wants_logits,
            state.wants_hidden,
            samples,
            len(drafted) > 0,
        )

    def _score(self, hidden: Sequence[tuple[ScheduledItem, torch.Tensor]]) -> PendingResult[set[str]]:
        """Score prompts; answers the ids of the sequences whose log-probabilities are not finite."""
        scored = [
            (item.state.sequence_id, (item.state.prompt_logprobs, item.start, rows))
            for item, rows in hidden
            if isinstance(item.state, RequestState) and item.state.prompt_logprobs is not None
        ]
        if not scored:  # as in a step that only decodes
            return PendingResult((), lambda _: set())
        result = self._scorer.score([prompt for _, prompt in scored])
        ids = [sequence_id for sequence_id, _ in scored]  # without the rows, which would outlive the next launch
        return result.then(lambda are_good: {i for i, is_good in zip(ids, are_good, strict=True) if not is_good})

    def _sample(self, rows: Rows, result: ForwardResult) -> ChosenTokens:
        """Choose tokens for the rows of the logits, unless the step has done so itself."""
        if result.chosen is not None:
            return chosen_plainly(result.chosen, rows)
        return self._sampler.sample(result.logits, rows)

    def _sampling_rows(self, generating: Sequence[tuple[ScheduledItem, RequestState]]) -> Rows:
        """A row for each of the items that generate, and for each draft."""
        rows: list[SamplingRow | None] = []
        for item, state in generating:
            first = item.start + item.num_scheduled_tokens - len(item.drafted)
            row = self._sampling_row(state, first) if item.samples and state.max_tokens > 0 else None
            rows.append(row)
            if item.drafted and row is not None:
                rows += self._rows_behind(state, row, item.drafted)
        return rows

    def _rows_behind(self, state: RequestState, row: SamplingRow, drafted: Sequence[int]) -> Iterator[SamplingRow]:
        """A row for each draft, as it will be once this one and those before it have been chosen."""
        for position, token_id in enumerate(drafted, start=row.position + 1):
            if row is not GREEDY_ROW:
                matcher = None if row.matcher is None else row.matcher.copy()
                if matcher is not None:
                    matcher.accept(token_id)
                row = row._replace(
                    position=position,
                    counts=None if row.counts is None else row.counts.with_tokens((token_id,)),
                    banned_token_ids=self._outputs.banned_token_ids(state, position),
                    matcher=matcher,
                )
            yield row

    def _sampling_row(self, state: RequestState, position: int) -> SamplingRow:
        if state.takes_best:
            return GREEDY_ROW
        return SamplingRow(
            params=state.request.params,
            position=position,
            seed=state.seed,
            counts=state.counts,
            banned_token_ids=self._outputs.banned_token_ids(state, position),
            matcher=state.matcher,
        )


def _read(result: PendingResult[R], on_host: Iterator[torch.Tensor]) -> R:
    return result.read(list(islice(on_host, len(result.tensors))))


def _pool(
    hidden: Sequence[tuple[ScheduledItem, torch.Tensor]], head: ClassificationHead | None
) -> PendingResult[list[VectorAnswer]]:
    """The vectors of the requests for embeddings, or for scores of classes, among the items."""
    embedded = [(item, item.state, rows) for item, rows in hidden if isinstance(item.state, EmbeddingState)]
    result = pool([(state, item.start, rows) for item, state, rows in embedded], head)
    states = [(item, state) for item, state, _ in embedded]  # without the rows, which would outlive the next launch
    return result.then(lambda vectors: [(*of, vector) for of, vector in zip(states, vectors, strict=True)])


def _answer(
    item: ScheduledItem, answer: SampledToken | EngineError | None, *, is_bad: bool
) -> SampledToken | FinishReason | EngineError | None:
    """What an item answers. The sampler's None means that no token was wanted and the chunk's KV is good: nothing yet,
    or the end of a request whose prompt is only scored.
    """
    if is_bad or isinstance(answer, NonFiniteLogits):
        end = item.start + item.num_scheduled_tokens
        return NonFiniteLogits(f"the model's values are not finite before position {end}")
    return FinishReason.LENGTH if answer is None and item.samples else answer


def _verified(
    generating: Sequence[tuple[ScheduledItem, RequestState]],
    answers: Iterator[SampledToken | EngineError | None],
    bad_prompts: Collection[str],
) -> list[TokenAnswer]:
    """What the items of a step with drafts answer. answers: one for each item, and for each draft."""
    found: list[TokenAnswer] = []
    for item, state in generating:
        first, *others = islice(answers, 1 + len(item.drafted))
        if others:
            found.append(_verified_item(item, state, [first, *others]))
        else:
            found.append((item, state, _answer(item, first, is_bad=state.sequence_id in bad_prompts)))
    return found


def _verified_item(
    item: ScheduledItem, state: RequestState, answers: Sequence[SampledToken | EngineError | None]
) -> TokenAnswer:
    """The item with as many tokens as are in KV for good, and what it answers.

    A row whose draft is what was chosen before it is as it would have been alone. A fault there is met again in the
    next step, unless it is the first. Where values are not finite a wrong draft may have made them so: the last token
    is run again without any.
    """
    if any(isinstance(answer, NonFiniteLogits) for answer in answers):
        return item._replace(num_scheduled_tokens=0), state, None
    tokens: list[SampledToken] = []
    for answer, drafted in zip(answers, (*item.drafted, None), strict=True):
        if not isinstance(answer, SampledToken):
            break
        tokens.append(answer)
        if answer.token_id != drafted:
            break
    if not tokens:
        return item._replace(num_scheduled_tokens=1), state, answers[0] if isinstance(answers[0], EngineError) else None
    return item._replace(num_scheduled_tokens=len(tokens)), state, VerifiedTokens(tuple(tokens))


@dataclass(frozen=True, eq=False, slots=True)
class StepInFlight:
    """A launched step, and how its answers are read once their one copy is on the host."""

    generating: list[tuple[ScheduledItem, RequestState]]
    tokens: ChosenTokens | None  # a row for each of `generating`; None where nothing is
    scores: PendingResult[set[str]]  # the ids of the sequences whose prompt's logits are not finite
    vectors: PendingResult[list[VectorAnswer]]
    copy: HostCopy  # of the tensors of the three, in this order
    num_drafted: int = 0  # tokens that are guessed: each has a row of its own behind its item's


@dataclass(frozen=True, slots=True)
class StepAnswers:
    """What model and sampler answered for each item of a step, or why they did not."""

    tokens: list[TokenAnswer]
    vectors: list[VectorAnswer]
