"""Runs a unit from the message that names it to its end, or another shard whose turn comes before it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from worker.broker.messages import Announcer, MessageEnd
from worker.registry.errors import InvalidJobId
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, UnitLeases
from worker.registry.lifecycle import ClaimRefusal, RunMode, StopReason
from worker.registry.queues import ShardQueue
from worker.runtime.held_units import HeldUnit, HeldUnits, reported
from worker.runtime.quarantine import Quarantine
from worker.runtime.shard import Turn
from worker.schemas import DEFAULT_PRIORITY
from worker.unit_closer import UnitCloser

FLUSH_TIMEOUT_S = 3.0  # for records on their way to Redis when a unit is given back
RETRY_S = 0.5
DRAIN_GIVE_BACK_S = 5.0  # how long to try to give a unit back to a Redis that is away, while this process ends
UNWELL_PAUSE_S = 1.0  # keeps the message from going round without rest
SLOT_WAIT_S = 0.5  # likewise: each spare thread of a full worker turns over two messages a second at most
# How long a suspect waits while another runs before its message goes back to other workers, which may be idle. Longer
# than SLOT_WAIT_S, so that it is likely to wait here when the other ends.
SUSPECT_WAIT_S = 5.0
MAX_CHOICES = 8  # tries to claim a shard before other workers do; then the message goes back

Work = Callable[[HeldUnit], None]

logger = logging.getLogger(__name__)

# One slot in so many is kept for tenants that have no shard here: a shard may run for an hour, and one tenant's shards
# in all slots would keep another tenant waiting for that long.
SLOTS_PER_RESERVED = 8
CONFIRM_S = 0.1  # between two looks that find the same shard waiting without a message
# For how long a shard may wait beside a free slot while messages do, which bring workers to shards too: with the time
# between two looks of the reaper, at most 0.5 s as shipped, less than a second.
PATIENCE_S = 2 * CONFIRM_S
OFFER_LOOKS = 3  # in a row: of a shard that waits, the first and the last are PATIENCE_S apart


class UnitFailed(Exception):
    """The work on a unit raised `cause`, which was logged, and the unit was given back: to Celery the task is over.

    Keeps only the cause's type and is raised `from None`, since Celery sends the whole traceback to Flower and a
    cause's text may quote a user.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(type(cause).__name__)


class UnitRunner:
    """Claims a unit on a message, has it worked on, and gives it back if it was not finished.

    A message about a plan means that plan. One about a shard only means that there are shards to run: ShardSlots
    chooses which, as the order of messages must not decide which tenant waits.
    """

    def __init__(
        self,
        leases: UnitLeases,
        closer: UnitCloser,
        held_units: HeldUnits,
        slots: ShardSlots,
        quarantine: Quarantine,
        *,
        is_well: Callable[[], bool],
    ) -> None:
        self._leases = leases
        self._closer = closer
        self._held_units = held_units
        self._slots = slots  # fewer than threads: a plan always finds one
        self._quarantine = quarantine
        self._is_well = is_well  # whether the engine's step has not lasted suspiciously long
        self._draining = threading.Event()

    def drain(self) -> None:
        """Claim no more; messages go back to the queue."""
        self._draining.set()
        self._quarantine.close()

    def offer(self) -> bool:
        """Announce a shard that waits without a message, see ShardSlots.offer; not while this worker ends."""
        return not self._draining.is_set() and self._slots.offer()

    def run(self, ref: UnitRef, message_id: str, work: Work) -> MessageEnd:
        """Run a unit on this thread. Raises UnitFailed if `work` or Redis did not let it, after it was given back."""
        if self._draining.is_set():
            return MessageEnd.REQUEUE
        if not self._is_well():
            # What is claimed now would hang too; meanwhile another worker may take the message.
            self._draining.wait(UNWELL_PAUSE_S)
            return MessageEnd.REQUEUE
        try:
            if ref in self._held_units and (ref.is_plan or self._slots.choose(ref) == ref):
                return MessageEnd.DONE  # a second copy of a message
            if ref.is_plan:
                return self._run_plan(ref, message_id, work)
            end = self._run_shard_in_slot(ref, message_id, work)
        except InvalidJobId as error:
            logger.warning("a message names no unit: %s", error)
            return MessageEnd.DONE
        except redis.RedisError as error:
            logger.warning("no unit could be claimed: %s", error, extra=ref.log_fields)
            raise UnitFailed(error) from None
        if end is None:
            self._draining.wait(SLOT_WAIT_S)  # the slots that are left are for other tenants
        return end or MessageEnd.REQUEUE

    def _run_plan(self, ref: UnitRef, message_id: str, work: Work) -> MessageEnd:
        # Beside a suspect too, which may run for an hour: new jobs would look lost meanwhile. A plan does not touch the
        # engine; should its first try still crash the process, the suspect is blamed wrongly.
        return self._claim_and_run(ref, message_id, work, alone=False) or self._run_alone(ref, message_id, work)

    def _run_shard_in_slot(self, hint: UnitRef, message_id: str, work: Work) -> MessageEnd | None:
        if not self._slots.take(SLOT_WAIT_S):
            return MessageEnd.REQUEUE  # for the worker that has a slot first
        try:
            end = self._run_shard(hint, message_id, work)
            # Whatever became of its message, the next shard need not wait for another way through the broker.
            while end is MessageEnd.DONE and self._goes_on:
                next_end = self._run_shard(None, message_id, work)
                if next_end is None:
                    break  # nothing is queued that may run here
                end = next_end
            return end
        finally:
            self._slots.give()

    @property
    def _goes_on(self) -> bool:
        """Whether a thread whose shard has ended may take another without a message."""
        return self._is_well() and not self._slots.is_wanted and not self._draining.is_set()

    def _run_shard(self, hint: UnitRef | None, message_id: str, work: Work) -> MessageEnd | None:
        """Run the shard whose turn it is, or else the one that `hint` names; None: none of them may run here."""
        if not self._quarantine.enter(SLOT_WAIT_S):
            if hint is None or self._draining.is_set() or not self._leases.is_suspect(hint):
                return MessageEnd.REQUEUE
            return self._run_alone(hint, message_id, work)
        try:
            found = self._claim_chosen(hint, message_id)
            if isinstance(found, HeldUnit):
                return self._run_held(found, work, alone=False)
        finally:
            self._quarantine.leave()
        return self._run_alone(found, message_id, work) if isinstance(found, UnitRef) else found

    def _claim_chosen(self, hint: UnitRef | None, message_id: str) -> HeldUnit | UnitRef | MessageEnd | None:
        """A shard to run, a suspect to run alone, or what becomes of the message; None: there is no slot for it.

        The message ends only where nothing else is queued: the shard it names may have gone to a worker that came with
        the message of another one, which then has none.
        """
        refused: UnitRef | None = None
        with self._slots.turn.to_claim(SLOT_WAIT_S) as may_choose:  # each choice depends on the last
            if not may_choose:
                return MessageEnd.REQUEUE
            for _ in range(MAX_CHOICES):
                ref = self._slots.choose(hint)
                if ref is None:
                    return None
                if ref == refused:
                    return MessageEnd.DONE
                claimed = self._claim(ref, message_id, alone=False)
                if claimed is ClaimRefusal.SUSPECT:
                    return ref if ref == hint else MessageEnd.REQUEUE  # the other has a message of its own
                if not isinstance(claimed, ClaimRefusal):
                    return claimed
                if ref == hint:
                    refused = hint
        return MessageEnd.REQUEUE

    def _run_alone(self, ref: UnitRef, message_id: str, work: Work) -> MessageEnd:
        if not self._quarantine.enter_alone(SUSPECT_WAIT_S):
            self._draining.wait(SLOT_WAIT_S)
            return MessageEnd.REQUEUE
        try:
            logger.info("the unit crashed a worker before and runs alone", extra=ref.log_fields)
            return self._claim_and_run(ref, message_id, work, alone=True) or MessageEnd.REQUEUE
        finally:
            self._quarantine.leave_alone()

    def _claim_and_run(self, ref: UnitRef, message_id: str, work: Work, *, alone: bool) -> MessageEnd | None:
        """What becomes of the message; None: the unit is a suspect, which must be claimed to run alone."""
        claimed = self._claim(ref, message_id, alone=alone)
        if isinstance(claimed, HeldUnit):
            return self._run_held(claimed, work, alone=alone)
        if isinstance(claimed, MessageEnd):
            return claimed
        return None if claimed is ClaimRefusal.SUSPECT else MessageEnd.DONE

    def _claim(self, ref: UnitRef, message_id: str, *, alone: bool) -> HeldUnit | ClaimRefusal | MessageEnd:
        if self._draining.is_set():
            return MessageEnd.REQUEUE
        claim = self._leases.claim(ref, alone=alone)
        if isinstance(claim, ClaimRefusal):
            logger.debug("not claimed: %s", claim, extra=ref.log_fields)
            return claim
        return self._held_units.hold(claim, message_id=message_id)

    def _run_held(self, held: HeldUnit, work: Work, *, alone: bool) -> MessageEnd:
        claim = held.claim
        with reported(held):
            try:
                if self._draining.is_set():  # since we looked
                    held.stop(StopReason.RELEASED)
                if claim.mode is RunMode.RUN:
                    if alone:
                        self._leases.begin_alone(claim)
                    work(held)
                else:
                    held.close(self._closer, claim.missing, claim.mode)
                return self._conclude(held)
            except redis.RedisError as error:
                logger.warning("the unit is given back: %s", error)
                held.stop(StopReason.RELEASED)
                self._give_back(held, count_attempt=False)
                raise UnitFailed(error) from None
            except Exception as error:  # a seam: a defect over this unit must count, or it would come round for ever
                logger.exception("a defect: the unit is given back, which counts as an attempt")
                held.stop(StopReason.FAILED)
                self._give_back(held, count_attempt=True)
                raise UnitFailed(error) from None
            finally:
                self._held_units.remove(held)

    def _conclude(self, held: HeldUnit) -> MessageEnd:
        if held.stop_reason is not None:
            # Records of what had finished are written before the lease is given back, so that it does not run again.
            # A lease may also be gone because the last write ended the unit and its answer is still on its way.
            held.wait_flushed(timeout_s=FLUSH_TIMEOUT_S)
        if not _is_to_go_back(held):
            return MessageEnd.DONE
        self._give_back(held, count_attempt=held.stop_reason is StopReason.ENGINE_FAILED)
        return MessageEnd.REQUEUE

    def _give_back(self, held: HeldUnit, *, count_attempt: bool) -> None:
        began_at, reason = time.monotonic(), held.stop_reason
        while True:
            try:
                if self._leases.release(held.claim, count_attempt=count_attempt):
                    held.settle(reason)
                return
            except redis.RedisError as error:
                logger.warning("the unit could not be given back: %s", error)
                limit_s = DRAIN_GIVE_BACK_S if self._draining.is_set() else self._leases.lease_s
                if time.monotonic() - began_at >= limit_s:
                    return  # the lease runs out by itself, which counts as an attempt
                time.sleep(RETRY_S)


def _is_to_go_back(held: HeldUnit) -> bool:
    reasons = (StopReason.SENT_AWAY, StopReason.RELEASED, StopReason.ENGINE_FAILED, StopReason.REWOUND)
    return not held.is_written and held.stop_reason in reasons


@dataclass(slots=True)
class _WaitingShard:
    """A shard that waits beside a free slot, as the looks at it have found it."""

    ref: UnitRef
    since_s: float  # it was first found, or last announced
    patience_s: float = PATIENCE_S
    alone_since_s: float | None = None  # since when no look found messages

    def is_due(self, now_s: float, *, has_messages: bool) -> bool:
        """Whether it is to be announced at this look, from which on it waits anew."""
        if has_messages:
            self.alone_since_s = None
        elif self.alone_since_s is None:
            self.alone_since_s = now_s
        is_alone = self.alone_since_s is not None and now_s - self.alone_since_s >= CONFIRM_S
        if not is_alone and now_s - self.since_s < self.patience_s:
            return False
        if not is_alone:
            self.patience_s *= 2
        self.since_s, self.alone_since_s = now_s, None
        return True


class ShardSlots:
    """Limits how many shards run in this worker at the same time, and chooses the next. Thread-safe."""

    def __init__(
        self, queue: ShardQueue, held_units: HeldUnits, announcer: Announcer, max_shards: int, *, turn: Turn
    ) -> None:
        self._queue = queue
        self._held_units = held_units
        self._announcer = announcer
        self._max_shards = max_shards
        self._seen: _WaitingShard | None = None  # at the last look
        self._num_shared = max_shards - max_shards // SLOTS_PER_RESERVED
        self._slots = threading.BoundedSemaphore(max_shards)
        self._waiting: set[int] = set()  # threads that wait for a slot
        self.turn = turn

    def take(self, timeout_s: float) -> bool:
        """Take a slot until `give`; False if none becomes free within `timeout_s`."""
        if self._slots.acquire(blocking=False):
            return True
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            return self._slots.acquire(timeout=timeout_s)
        finally:
            self._waiting.remove(thread)

    @property
    def is_wanted(self) -> bool:
        """Whether a message waits for a slot, perhaps that of a shard which must run alone."""
        return bool(self._waiting)

    def give(self) -> None:
        """Give back the slot that `take` got."""
        self._slots.release()

    def choose(self, hint: UnitRef | None) -> UnitRef | None:
        """The shard to claim on a message about `hint`, or on none, see ShardQueue.choose. Raises redis.RedisError."""
        held = self._held()
        return self._queue.choose(hint, held, only_new_tenants=len(held) >= self._num_shared)

    def offer(self) -> bool:
        """Announce a shard that waits although a slot is free for it here.

        Whatever became of a shard's own message, an idle worker then looks again, with each look of the reaper. It is
        announced if it was found so twice without any message: one may just be on its way, or at another worker that
        is about to claim. Where messages wait, whose workers may have no thread for them, it is announced after
        PATIENCE_S, then after twice that, and so on, since each adds one. True where another look, CONFIRM_S later, is
        to show that. Waits for no Redis that is away.
        """
        held, seen, self._seen = self._held(), self._seen, None
        if len(held) >= self._max_shards:
            return False
        try:
            ref = self._queue.choose(None, held, only_new_tenants=len(held) >= self._num_shared)
            has_messages = ref is not None and self._queue.has_messages()
        except redis.RedisError as error:
            logger.warning("could not look for shards that wait: %s", error)
            return False
        if ref is None:
            return False
        now = time.monotonic()
        self._seen = seen if seen is not None and seen.ref == ref else _WaitingShard(ref, now)
        if self._seen.is_due(now, has_messages=has_messages):
            logger.info("announcing a shard that waits while a slot is free", extra=ref.log_fields)
            self._announcer.announce(ref, DEFAULT_PRIORITY, self._queue.model)
            return False
        return not has_messages or self._seen.patience_s == PATIENCE_S

    def _held(self) -> list[Claim]:
        return [unit.claim for unit in self._held_units.all() if not unit.claim.ref.is_plan]
