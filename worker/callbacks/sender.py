"""Sends the events in the outbox, from every worker and server that may: whoever takes one has it for a lease."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from settings import Settings
from settings.callbacks import CallbackSettings
from worker.app import create_app
from worker.broker.messages import send_task_to
from worker.callbacks.delivery import DeliveryFailed, post
from worker.registry.callbacks import CallbackKind, CallbackOutbox, CallbackTarget, TakenCallback
from worker.registry.connect import connect
from worker.registry.errors import InvalidOption
from worker.registry.keys import Keys

LOOK_INTERVAL_S = 1.0  # between two looks while nothing is due
MAX_SENDING = 16  # of a kind at once: a receiver that hangs keeps one of these places for callbacks.timeout_s
FIRST_WAIT_S = 5.0  # before the second try; it doubles
LEAST_LEASE_S = 30.0
STOP_TIMEOUT_S = 3.0  # for what is on its way

logger = logging.getLogger(__name__)


def kinds_sent_with(settings: Settings) -> tuple[CallbackKind, ...]:
    """Which events a process of these settings sends; the others wait for one that may."""
    limits = settings.limits
    has_hosts = bool(limits.callback_host_names or limits.callback_private_host_names)
    urls = (CallbackKind.URL,) if has_hosts and settings.callbacks.secret is not None else ()
    return (*urls, *((CallbackKind.TASK,) if limits.callback_queue_names else ()))


def wait_before_next_s(num_tries: int, settings: CallbackSettings, share: float) -> float:
    """The wait after `num_tries` failed ones: 5, 10, 20 s and so on, times 0.5 to 1.5 by `share` of 0 to 1."""
    doubled_s = FIRST_WAIT_S * 2.0 ** min(num_tries - 1, 60)
    return min(doubled_s, settings.longest_wait_s) * (0.5 + share)


class _Places:
    """Where events of one kind are on their way. A tenant takes none while it has as many as are free.

    So one whose receivers hang has half of the places, a second one a quarter, and a fifth fills them.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._taken: Counter[str] = Counter()
        self._num_left = 0
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_left(self) -> int:
        """How many were taken and left so far."""
        return self._num_left

    def crowded(self) -> list[str]:
        """The tenants that take none for now."""
        with self._changed:
            return [tenant for tenant, number in self._taken.items() if number >= self._num_free]

    def take(self, tenant: str) -> None:
        with self._changed:
            self._num_free -= 1
            self._taken[tenant] += 1

    def leave(self, tenant: str) -> None:
        with self._changed:
            self._num_free += 1
            self._num_left += 1
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
            self._changed.notify_all()

    def were_free_since(self, num_left: int) -> bool:
        """Whether none is taken, nor was one left after the `num_left` before."""
        with self._changed:
            return not self._taken and self._num_left == num_left

    def wait_for_one(self, num_left: int, timeout_s: float) -> None:
        """Wait until another one was left than the `num_left` before, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_left != num_left, timeout_s)

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until none is taken, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken, timeout_s)


class CallbackSender:
    """Takes events that are due and sends each on a thread of its own, so that no receiver holds up another's."""

    def __init__(
        self, outbox: CallbackOutbox, app: Celery, settings: Settings, *, look_interval_s: float = LOOK_INTERVAL_S
    ) -> None:
        self._outbox = outbox
        self._app = app
        self._settings = settings
        self._kinds = kinds_sent_with(settings)
        self._look_interval_s = look_interval_s
        self._lease_s = max(LEAST_LEASE_S, 3 * settings.callbacks.timeout_s)
        self._ways: dict[CallbackKind, Callable[[TakenCallback], None]] = {
            CallbackKind.URL: self._post,
            CallbackKind.TASK: self._send_task,
        }

    @property
    def has_work(self) -> bool:
        """Whether this process may send any event."""
        return bool(self._kinds)

    def run(self, stopping: threading.Event) -> None:
        """Send until told to stop, then wait a moment for what is on its way. Each kind has a thread and places."""
        threads = [
            threading.Thread(target=self._run, args=(kind, stopping), name=f"{kind}-callbacks", daemon=True)
            for kind in self._kinds
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, kind: CallbackKind, stopping: threading.Event) -> None:
        places = _Places(MAX_SENDING)
        search_at_s = 0.0  # when to look behind the events of crowded tenants again, if there are any
        while not stopping.is_set():
            num_left, crowded = places.num_left, places.crowded()
            try:
                if not crowded or (places.num_free and time.monotonic() >= search_at_s):
                    if self._send_next(kind, places, crowded):
                        continue
                    search_at_s = time.monotonic() + self._look_interval_s
            except redis.RedisError as error:
                logger.warning("callbacks could not be looked for: %s", error)
            except Exception:  # a seam: a defect costs a look, not the process, nor the sending without a word
                logger.exception("callbacks could not be looked for")
            if places.were_free_since(num_left):
                stopping.wait(self._look_interval_s)
            else:
                places.wait_for_one(num_left, self._look_interval_s)
        places.wait_for_all(STOP_TIMEOUT_S)  # the rest is sent again by whoever takes it when the lease has run out

    def _send_next(self, kind: CallbackKind, places: _Places, but_of: list[str]) -> bool:
        """Whether an event was taken; none of the tenants `but_of` is."""
        longest_s = 1.5 * self._settings.callbacks.longest_wait_s
        taken = self._outbox.take(kind, lease_s=self._lease_s, longest_wait_s=longest_s, but_of=but_of)
        if taken is None:
            return False
        tenant = taken.event.tenant
        places.take(tenant)
        try:
            # Daemons: a receiver, or a resolver, that hangs does not keep the process from ending.
            threading.Thread(target=self._send, args=(taken, places), name="callback", daemon=True).start()
        except BaseException:
            places.leave(tenant)
            raise
        return True

    def _send(self, taken: TakenCallback, places: _Places) -> None:
        try:
            error = self._error_of(taken)
            with suppress(redis.RedisError):  # then it is sent once more, when the lease has run out
                self._settle(taken, error)
        finally:
            places.leave(taken.event.tenant)

    def _error_of(self, taken: TakenCallback) -> str:
        """Why the event was not taken; "": it was."""
        if taken.event.tries > self._settings.callbacks.max_tries:
            return taken.event.error or "whoever sent it died"
        try:
            self._ways[taken.event.kind](taken)
        except (DeliveryFailed, InvalidOption) as error:
            return str(error)
        except (OperationalError, redis.RedisError, OSError) as error:
            return f"the task could not be sent: {error}"
        except Exception as error:  # a seam: a defect costs a try, not the thread without a word
            logger.exception("a callback could not be sent")
            return f"a defect of the sender: {type(error).__name__}"
        return ""

    def _settle(self, taken: TakenCallback, error: str) -> None:
        fields = {"callback": taken.event.id, "job_id": taken.event.job_id, "try": taken.event.tries}
        if not error:
            self._outbox.settle(taken)
            logger.info("callback sent", extra=fields)
        elif taken.event.tries >= self._settings.callbacks.max_tries:
            self._outbox.settle(taken, error)
            logger.error("callback given up: %s", error, extra=fields)
        else:
            wait_s = wait_before_next_s(taken.event.tries, self._settings.callbacks, random.random())
            self._outbox.settle(taken, error, wait_s=wait_s)
            logger.warning("callback not sent, again in %.0f s: %s", wait_s, error, extra=fields)

    def _post(self, taken: TakenCallback) -> None:
        secret = self._settings.callbacks.secret
        if secret is None:
            raise DeliveryFailed("callbacks.secret is not set")
        target = CallbackTarget.checked(taken.event.target, self._settings.limits)
        post(taken.event, target, secret=secret.get_secret_value(), timeout_s=self._settings.callbacks.timeout_s)

    def _send_task(self, taken: TakenCallback) -> None:
        target = CallbackTarget.checked(taken.event.target, self._settings.limits)
        send_task_to(self._app, target.queue, target.task, taken.event.id, taken.event.message)


@contextmanager
def sending_callbacks(settings: Settings) -> Iterator[None]:
    """Send callbacks on a thread for the length of the block, over connections of its own, if settings allow any."""
    if not kinds_sent_with(settings):
        yield
        return
    app, stopping = create_app(settings), threading.Event()
    with connect(settings.redis) as client:
        sender = CallbackSender(CallbackOutbox(client, Keys()), app, settings)
        thread = threading.Thread(target=sender.run, args=(stopping,), name="callbacks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()  # STOP_TIMEOUT_S, and a call of Redis that is under way
            app.close()
