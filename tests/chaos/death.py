"""The points at which a worker can be killed exactly."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from kombu.transport.redis import QoS

from tests.support.fake_engine import FakeEngine
from worker.registry.leases import Claim, UnitLeases
from worker.registry.lifecycle import PutStatus
from worker.runtime.held_units import HeldUnits

STEPS_BEFORE_DEATH = 3


def die_at(point: str) -> None:
    """From now on this process dies when it first comes to `point`, a name of DEATHS, DEATHS_OF_PLANS (kill -9) or
    BREAKAGES.
    """
    (DEATHS | DEATHS_OF_PLANS | BREAKAGES)[point]()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before(
    owner: type, name: str, is_time: Callable[..., bool] = lambda *_: True, die: Callable[[], None] = _die
) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **options: Any) -> Any:
        if is_time(*args):
            die()
        return original(*args, **options)

    setattr(owner, name, replaced)


def _die_after(owner: type, name: str, is_time: Callable[[Any], bool]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if is_time(result):
            _die()
        return result

    setattr(owner, name, replaced)


def _is_claimed_shard(result: object) -> bool:
    return isinstance(result, Claim) and not result.ref.is_plan


def _is_last_put(result: tuple[PutStatus, object]) -> bool:
    return result[0] in (PutStatus.UNIT_DONE, PutStatus.JOB_DONE)


def _steps_are_up() -> Callable[..., bool]:
    steps = iter(range(1_000_000))
    return lambda *_: next(steps) >= STEPS_BEFORE_DEATH


def _break_engine() -> None:
    raise RuntimeError("broken for a test")


def _fault_device() -> None:
    """The step raises what PyTorch makes of a kernel's fault; what touches the device from then on never returns."""
    import torch  # here: it costs each worker of these tests 3 s, and one of them needs it

    def hang(*_: Any) -> None:
        time.sleep(3600)

    for name in ("close", "abort", "checkpoint", "due_checkpoints", "add_request", "step"):
        setattr(FakeEngine, name, hang)
    atexit.register(hang)  # as a driver whose context is torn down over a kernel that hangs
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


DEATHS: dict[str, Callable[[], None]] = {
    # The message is out of its list and not yet in `unacked`: nobody has it.
    "after BRPOP": lambda: _die_before(QoS, "append"),
    "after claim": lambda: _die_after(UnitLeases, "claim", _is_claimed_shard),
    "mid-decode": lambda: _die_before(FakeEngine, "step", _steps_are_up()),
    "after put before ack": lambda: _die_after(UnitLeases, "put", _is_last_put),
    # The drain waits here for what runs.
    "during drain": lambda: _die_before(HeldUnits, "wait_empty"),
}
# Of a strict job whose file is bad.
DEATHS_OF_PLANS: dict[str, Callable[[], None]] = {
    "before refusal": lambda: _die_before(UnitLeases, "fail"),
    "after refusal": lambda: _die_after(UnitLeases, "fail", bool),
}
# Not by a signal: the worker ends itself, with 70.
BREAKAGES: dict[str, Callable[[], None]] = {
    "engine breaks": lambda: _die_before(FakeEngine, "step", _steps_are_up(), _break_engine),
    "device faults": lambda: _die_before(FakeEngine, "step", _steps_are_up(), _fault_device),
}
