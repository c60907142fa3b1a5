"""The bare model without scheduler and sampler: prepare, prefill, decode, release, reset.

Each item of a call is answered with one of three types (`ItemResult`); no length or sign has a meaning beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from engine.errors import EngineError, InvalidRequest, KVPoolExhausted, NonFiniteLogits, PromptTooLong
from engine.execution.batch import ForwardItem
from engine.execution.forward import WARM_UP_TOKEN, StepExecutor, check_warm_up
from engine.kv_cache.block_manager import BlockManager
from engine.model_status import MemoryProfile, ModelCapabilities, ModelReport, ModelStatus
from engine.request import RESERVED_PREFIX
from engine.stats import PrefixCacheMetrics
from settings import EngineSettings

WARM_UP_ID = f"{RESERVED_PREFIX}_warm_up__"


class ModelInterface:
    """Runs the sequences that its caller names, on the executor and the KV blocks that the engine schedules on.

    So there is one KV store, and nothing to copy between two. Each item gets a result or an error of its own.
    Single-threaded, like the engine that owns it.
    """

    def __init__(
        self,
        executor: StepExecutor,
        block_manager: BlockManager,
        settings: EngineSettings,
        max_model_len: int,
        memory_profile: MemoryProfile | None = None,
    ) -> None:
        self._executor = executor
        self._blocks = block_manager
        self._settings = settings
        self._max_model_len = max_model_len
        self._report = ModelReport(executor, block_manager, settings, memory_profile)
        self._entries: dict[str, CacheEntry] = {}
        self._failure: str | None = None

    def kv_capacity(self) -> int:
        """Tokens one sequence may have: the bound by which requests are refused and blocks allocated."""
        return min(self._max_model_len, self._blocks.capacity_tokens)

    def mark_failed(self, reason: str) -> None:
        """Note why the model can no longer be trusted: `status` says so from now on."""
        self._failure = reason

    def warm_up(self) -> None:
        """Capture the decode graphs, once; run one token under a reserved id and give its block back.

        Raises NonFiniteLogits if that answers NaN.
        """
        self._executor.capture_graphs()
        try:
            if self._executor.model.lm_head is None:  # nothing to prefill for: the token's KV goes to the null block
                item = ForwardItem([WARM_UP_TOKEN], 0, [0], wants_logits=False, wants_hidden=True)
                check_warm_up(*self._executor.execute([item]).hidden)
            elif isinstance(result := self.prefill(WARM_UP_ID, [WARM_UP_TOKEN]), ErrorResult):
                raise result.error
        except EngineError as error:
            self.mark_failed(str(error))
            raise
        finally:
            self._drop(WARM_UP_ID, trusted=False)

    def prepare(self, cache_id: str, max_tokens: int) -> None:
        """Warm the model up and register `cache_id` without tokens, if there is room for `max_tokens` at this moment.

        Takes no block before tokens arrive, since these are looked up in the prefix cache first.
        Raises InvalidRequest for a reserved or known id, PromptTooLong, KVPoolExhausted.
        """
        self._check_new_id(cache_id)
        if max_tokens > self.kv_capacity():
            raise PromptTooLong(max_tokens, self.kv_capacity())
        self.warm_up()
        need = self._blocks.blocks_for(max_tokens)
        if need > self._blocks.num_free_blocks:
            raise KVPoolExhausted(need=need, free=self._blocks.num_free_blocks)
        self._entries[cache_id] = CacheEntry()

    def prefill(self, cache_id: str, token_ids: Sequence[int]) -> ItemResult:
        """Run a prompt, or its continuation, in chunks; the last token's logits.

        A failed item leaves no blocks behind: its sequence is released.
        """
        entry = self._entries.get(cache_id)
        position = len(entry.token_ids) if entry is not None else 0
        try:
            return self._prefill(UnifiedItem(cache_id, token_ids, position, True))
        except EngineError as error:
            return ErrorResult(error)
        except BaseException:
            self._drop(cache_id, trusted=False)
            raise

    def decode(self, cache_id: str, token_id: int, position: int) -> ItemResult:
        """Run one token; its logits."""
        return self.decode_batch([DecodeItem(cache_id, token_id, position)], full_logits=True)[0]

    def decode_batch(self, items: Sequence[DecodeItem], *, full_logits: bool = False) -> list[ItemResult]:
        """Run one token of each sequence. Results in the order of the items, tokens where `engine.greedy_argmax` is
        on and `full_logits` is not asked for, else logits: whatever the batch size.
        """
        unified = [UnifiedItem(item.cache_id, [item.token_id], item.position, True) for item in items]
        results: list[ItemResult] = []
        for first in range(0, len(unified), self._settings.max_num_seqs):
            chunk = unified[first : first + self._settings.max_num_seqs]
            results += [r for r in self._run(chunk, full_logits, may_open=False) if r is not None]
        return results

    def unified_forward(self, items: Sequence[UnifiedItem], *, full_logits: bool = False) -> list[ItemResult | None]:
        """Prefill chunks and decodes in one forward pass; None for an item that is not final and did not fail.

        Raises UnifiedRefused, having run nothing, for a batch that another verb runs better or that does not fit.
        """
        if not items:
            return []
        num_tokens = sum(len(item.token_ids) for item in items)
        reason = self._refusal(items, num_tokens)
        if reason is not None:
            raise UnifiedRefused(reason, num_tokens=num_tokens, limit=self._settings.max_num_batched_tokens)
        return self._run(items, full_logits, may_open=True)

    def release(self, cache_id: str) -> None:
        """Forget a sequence and free its blocks; may be called twice. The pool and the prefix cache stay."""
        self._drop(cache_id, trusted=True)

    def reset(self) -> list[str]:
        """Release every sequence of this interface; their ids."""
        dropped = list(self._entries)
        for cache_id in dropped:
            self.release(cache_id)
        return dropped

    def cache_metrics_snapshot(self) -> PrefixCacheMetrics:
        """Counters of the prefix cache."""
        return self._blocks.metrics(self._executor.kv_cache.spec.bytes_per_block)

    def capabilities(self) -> ModelCapabilities:
        """What the model can do on this device."""
        return self._report.capabilities(self.kv_capacity())

    def status(self) -> ModelStatus:
        """How the model is doing."""
        return self._report.status(failure=self._failure)

    def _refusal(self, items: Sequence[UnifiedItem], num_tokens: int) -> UnifiedRefusal | None:
        if all(self._is_decode(item) for item in items):
            return UnifiedRefusal.PURE_DECODE
        if len(items) == 1 and len(items[0].token_ids) > 1:
            return UnifiedRefusal.SINGLE_PREFILL
        if not self._settings.unified_prefill:
            return UnifiedRefusal.SWITCHED_OFF
        if num_tokens > self._settings.max_num_batched_tokens:
            return UnifiedRefusal.TOO_MANY_TOKENS
        if len(items) > self._settings.max_num_seqs:
            return UnifiedRefusal.TOO_MANY_SEQUENCES
        return None

    def _is_decode(self, item: UnifiedItem) -> bool:
        entry = self._entries.get(item.cache_id)
        return entry is not None and entry.is_open and len(item.token_ids) == 1 and item.is_final

    def _prefill(self, item: UnifiedItem) -> ItemResult:
        forward = self._allocate(item, may_open=True)
        limit = self._settings.max_num_batched_tokens
        tokens = forward.token_ids
        logits = torch.empty(0)
        for first in range(0, len(tokens), limit):
            chunk = tokens[first : first + limit]
            is_last = first + limit >= len(tokens)
            logits = self._executor.execute(
                [ForwardItem(chunk, forward.start + first, forward.block_table, wants_logits=is_last, is_final=is_last)]
            ).logits
        return self._settle(item.cache_id, logits[0].float(), wants_token=False)

    def _run(self, items: Sequence[UnifiedItem], full_logits: bool, *, may_open: bool) -> list[ItemResult | None]:
        results: list[ItemResult | None] = [None] * len(items)
        ready: list[tuple[int, ForwardItem]] = []
        seen: set[str] = set()
        for index, item in enumerate(items):
            try:
                if item.cache_id in seen:
                    raise _refused_id(item.cache_id, f"sequence {item.cache_id!r} is twice in one batch")
                seen.add(item.cache_id)
                ready.append((index, self._allocate(item, may_open=may_open)))
            except EngineError as error:
                results[index] = ErrorResult(error)
        try:
            logits = self._executor.execute([forward for _, forward in ready]).logits.float()
        except BaseException:
            for index, _ in ready:
                self._drop(items[index].cache_id, trusted=False)
            raise
        wants_token = self._settings.greedy_argmax and not full_logits
        for (index, forward), row in zip(ready, logits, strict=True):
            result = self._settle(items[index].cache_id, row, wants_token=wants_token and forward.is_final)
            if forward.is_final or isinstance(result, ErrorResult):
                results[index] = result
        return results

    def _allocate(self, item: UnifiedItem, *, may_open: bool) -> ForwardItem:
        """Check an item and give it blocks. On an error nothing has changed."""
        entry = self._entries.get(item.cache_id)
        if entry is None:
            if not may_open:
                raise _refused_id(item.cache_id, f"unknown sequence {item.cache_id!r}")
            if item.cache_id != WARM_UP_ID:
                self._check_new_id(item.cache_id)
            entry = CacheEntry()
        self._check_tokens(item, entry)
        start = len(entry.token_ids)
        known = [*entry.token_ids, *item.token_ids]
        if entry.is_open:
            self._blocks.grow(_sequence_id(item.cache_id), len(known))
        else:
            start = self._blocks.open(_sequence_id(item.cache_id), self._blocks.new_chain(known, salt=""), known)
            entry.is_open = True
        entry.token_ids = known
        self._entries[item.cache_id] = entry
        block_table = self._blocks.block_table(_sequence_id(item.cache_id))
        return ForwardItem(known[start:], start, block_table, wants_logits=True, is_final=item.is_final)

    def _check_tokens(self, item: UnifiedItem, entry: CacheEntry) -> None:
        if not item.token_ids:
            raise InvalidRequest("no tokens to run", param="token_ids", value=[], accepted="at least one token id")
        vocab_size = self._executor.model.config.vocab_size
        for token_id in item.token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary; accepted: 0 to {vocab_size - 1}",
                    param="token_ids", value=token_id, accepted=f"0 to {vocab_size - 1}",
                )  # fmt: skip
        if item.position != len(entry.token_ids):
            raise InvalidRequest(
                f"position is {item.position}; the sequence holds {len(entry.token_ids)} tokens",
                param="position", value=item.position, accepted=str(len(entry.token_ids)),
            )  # fmt: skip
        need = len(entry.token_ids) + len(item.token_ids)
        if need > self.kv_capacity():
            raise PromptTooLong(need, self.kv_capacity(), param="token_ids")

    def _settle(self, cache_id: str, logits: torch.Tensor, *, wants_token: bool) -> ItemResult:
        if not bool(torch.isfinite(logits.amax())):
            self._drop(cache_id, trusted=False)
            return ErrorResult(NonFiniteLogits(f"the logits of {cache_id!r} are not finite"))
        entry = self._entries[cache_id]
        self._blocks.commit(_sequence_id(cache_id), entry.token_ids, len(entry.token_ids))
        if wants_token:
            return TokenResult(int(logits.argmax()))
        return LogitsResult(logits.clone())  # the caller's; those of a replay last until the next step

    def _check_new_id(self, cache_id: str) -> None:
        if cache_id in self._entries or cache_id.startswith(RESERVED_PREFIX):
            accepted = f"a new id that does not start with {RESERVED_PREFIX!r}"
            raise _refused_id(cache_id, f"cache_id {cache_id!r} is taken; accepted: {accepted}")

    def _drop(self, cache_id: str, *, trusted: bool) -> None:
        entry = self._entries.pop(cache_id, None)
        if entry is None or not entry.is_open:
            return
        if trusted:
            self._blocks.free(_sequence_id(cache_id))
        else:
            self._blocks.discard(_sequence_id(cache_id))


def _refused_id(cache_id: str, why: str) -> InvalidRequest:
    return InvalidRequest(why, param="cache_id", value=cache_id)


def _sequence_id(cache_id: str) -> str:
    """Its name in the block manager: no request of the engine may have one that begins like this."""
    return f"{RESERVED_PREFIX}/{cache_id}"


@dataclass(slots=True)
class CacheEntry:
    """A sequence of the model interface. Written by ModelInterface alone."""

    token_ids: list[int] = field(default_factory=list)  # known; all in KV between calls
    is_open: bool = False  # has blocks


@dataclass(frozen=True, slots=True)
class DecodeItem:
    """Run one token of a prepared or prefilled sequence."""

    cache_id: str
    token_id: int
    position: int  # = tokens of this sequence in KV


@dataclass(frozen=True, slots=True)
class UnifiedItem:
    """Run some tokens of a sequence, new (position 0) or known."""

    cache_id: str
    token_ids: Sequence[int]
    position: int  # of the first token: = tokens of this sequence known so far
    is_final: bool  # its last token's result is wanted


@dataclass(frozen=True, slots=True)
class TokenResult:
    """The greedy choice."""

    token_id: int


@dataclass(frozen=True, eq=False, slots=True)
class LogitsResult:
    """The item's logits [V], float32."""

    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class ErrorResult:
    """This item failed; its batch mates did not."""

    error: EngineError


ItemResult = TokenResult | LogitsResult | ErrorResult


class UnifiedRefusal(Enum):
    """Why a batch was refused, so that the caller can split it; nothing of it was run."""

    PURE_DECODE = "every item is one final token: decode_batch is faster"
    SINGLE_PREFILL = "one item with several tokens: prefill is faster"
    SWITCHED_OFF = "engine.unified_prefill is off"
    TOO_MANY_TOKENS = "more tokens than engine.max_num_batched_tokens"
    TOO_MANY_SEQUENCES = "more sequences than engine.max_num_seqs"


class UnifiedRefused(EngineError):
    """`unified_forward` refused the whole batch; `reason` says why."""

    def __init__(self, reason: UnifiedRefusal, *, num_tokens: int, limit: int) -> None:
        super().__init__(f"{reason.value} ({num_tokens} tokens, limit {limit})")
        self.reason = reason
