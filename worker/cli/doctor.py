"""`millrace doctor`: is everything here that a worker needs?"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import click

from settings import EffectiveSettings
from worker.cli.command_settings import load_command_settings, redis_options
from worker.cli.exit_code import ExitCode
from worker.cli.install_hint import INSTALL_ENGINE
from worker.doctor.finding import Finding
from worker.doctor.level import Level
from worker.doctor.redis_findings import redis_findings


@click.command("doctor")
@click.option("--model", metavar="DIR", help="Checkpoint directory (model.path).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of findings.")
@redis_options
def command(model: str | None, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Look at Redis, the workers, this machine and the model, and say how to mend what is wrong.

    With a model this machine is to be a worker, else a producer. Nothing is changed and no weight is loaded. Exit code
    1 if something will not work; a warning is not that.
    """
    effective = load_command_settings(assignments, {"model.path": model, "redis.url": redis_url})
    findings = []
    for finding in _findings(effective):
        findings.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        click.echo(_summary(findings))
    if any(finding.level is Level.FAILED for finding in findings):
        sys.exit(ExitCode.FAILED)


def _findings(effective: EffectiveSettings) -> Iterator[Finding]:
    shown_url = next(row.value_text for row in effective.rows() if row.key == "redis.url")
    is_worker = effective.settings.model.path is not None
    yield from redis_findings(effective.settings.redis, shown_url, for_worker=is_worker)
    if importlib.util.find_spec("torch") is None:
        yield Finding(
            "torch",
            Level.WARNING,
            "not installed: this machine can submit jobs, not run them",
            f"{INSTALL_ENGINE}, where a worker is to run",
        )
        return
    # Imported here: a producer has no torch, and doctor must tell it so.
    from worker.doctor.engine_findings import engine_findings  # noqa: PLC0415  # torch comes with it

    yield from engine_findings(effective)


def _show(finding: Finding) -> None:
    click.echo(f"{finding.level.value:8} {finding.check}: {finding.detail}")
    if finding.fix is not None:
        click.echo(f"{'':8} fix: {finding.fix}")


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    return ", ".join(f"{counts[level]} {level.value}" for level in Level)
