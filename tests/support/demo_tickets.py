"""The demo's model and tickets, whose right answers are known: wrong bytes anywhere show as wrong answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from engine.engine import Engine
from settings import LimitSettings, ModelSettings
from worker.demo.run import CHECKPOINT, GOAL
from worker.demo.tickets import Ticket, demo_lines
from worker.offline import LineFeed, OfflineRun

__all__ = ["CHECKPOINT", "GOAL", "ticket_lines", "run_lines"]


def ticket_lines(tickets: Mapping[str, Ticket], *, by_schema: bool = True) -> list[dict[str, Any]]:
    """The demo's lines for these tickets; without the schema nothing holds the model to JSON."""
    lines: list[dict[str, Any]] = list(demo_lines(tickets))
    if not by_schema:
        for line in lines:
            del line["body"]["response_format"]
    return lines


def run_lines(engine: Engine, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of these lines, as `millrace run` makes them, in this process."""
    records: list[Mapping[str, Any]] = []
    run = OfflineRun(engine, ModelSettings(name=CHECKPOINT.name), window=64, write=records.append)
    feed = LineFeed([json.dumps(line).encode() for line in lines], LimitSettings(), capacity=64, by_prefix=True)
    feed.start()
    run.run(feed, lambda: False, lambda: None)
    return records
