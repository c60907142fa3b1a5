"""Runs a worker for fault injection: `python -m tests.chaos.worker_program OPTIONS KEY=VALUE ...`

OPTIONS is JSON, see WorkerOptions. It differs from `millrace worker` in that the engine may be a fake one and that the
broker's visibility timeout is short: a test can wait for what a killed worker had not acknowledged. Only the standard
library is imported at the top: the clock may have to be shifted before kombu takes its own reference to time.time.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

RESTORE_INTERVAL_S = 1  # how often messages of dead workers are looked for; 10 in production
MUTEX_EXPIRE_S = 2  # of a worker that died while it looked; 30 in production


@dataclass(frozen=True)
class WorkerOptions:
    """What the command line of the worker program says, as JSON. Needs no imports, as the program's docstring says."""

    engine: dict[str, Any] | None = None  # options of a FakeEngine; none: the real one, on `model.path`
    visibility_timeout_s: int = 4  # the same for all workers of one Redis
    die_at: str = ""  # a name of DEATHS
    clock_shift_s: float = 0.0
    notes_known: bool = False  # each unit says how many of its records its holder knew of at its last write or renewal
    has_other_scripts: bool = False  # scripts of the same effect with other digests, as of another version
    log_level: str = "INFO"  # DEBUG: also what Celery says of every message


def main() -> int:
    """Run the worker; its exit code."""
    options = WorkerOptions(**json.loads(sys.argv[1]))
    if options.clock_shift_s:
        _shift_clock(options.clock_shift_s)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(threadName)s %(name)s %(levelname)s %(message)s")
    return _run_worker(options, sys.argv[2:])


def _run_worker(options: WorkerOptions, assignments: list[str]) -> int:
    # Imported here: kombu takes its own reference to time.time when it is imported.
    from settings import load_settings, parse_assignments
    from tests.chaos.faults import die_at
    from worker import celery_worker
    from worker.app import create_app

    def create_app_of_short_visibility(settings: Any, models: Any) -> Any:
        app = create_app(settings, models)
        app.conf.broker_transport_options = {
            **app.conf.broker_transport_options,
            "unacked_restore_interval": RESTORE_INTERVAL_S,
            "unacked_mutex_expire": MUTEX_EXPIRE_S,
            "visibility_timeout": options.visibility_timeout_s,
        }
        return app

    # setattr, since mypy refuses to assign to a name that the module imports itself.
    setattr(celery_worker, "create_app", create_app_of_short_visibility)  # noqa: B010
    if options.die_at:
        die_at(options.die_at)
    if options.has_other_scripts:
        _change_scripts()
    if options.notes_known:
        _note_known()
    effective = load_settings(parse_assignments(assignments), environ={})
    return celery_worker.run_worker(
        effective, _load_engine if options.engine is None else _load_fake_engine(options.engine)
    )


def _change_scripts() -> None:
    from worker.registry import lua

    source = lua.script_source
    lua.script_source = lambda name: f"{source(name)}-- of another version\n"


def _note_known() -> None:
    from worker.registry import lua

    source, check = lua.script_source, ">= tonumber(expected) then return false end"

    def noting(name: str) -> str:
        text = source(name)
        assert name != "prelude" or check in text
        return text.replace(check, check.replace("return", "redis.call('HSET', UNIT, 'known', expected) return"))

    lua.script_source = noting


def _load_engine(effective: Any) -> Any:
    from tests.chaos.real_engines import CheckedEngine
    from tests.support.engines import load_decoder_engine

    return CheckedEngine(load_decoder_engine(effective))


def _load_fake_engine(engine: dict[str, Any]) -> Any:
    from tests.support.fake_engine import FakeEngine

    return lambda _effective: FakeEngine(**engine)


def _shift_clock(shift_s: float) -> None:
    now_s, now_ns = time.time, time.time_ns
    time.time = lambda: now_s() + shift_s
    time.time_ns = lambda: now_ns() + round(shift_s * 1e9)


if __name__ == "__main__":
    sys.exit(main())
