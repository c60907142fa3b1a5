"""`millrace doctor`: is everything here that a worker needs?"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator

import click

from settings import EffectiveSettings
from worker.cli.command_settings import load_command_settings, redis_options
from worker.cli.exit_code import ExitCode
from worker.cli.finding import Finding
from worker.cli.install_hint import INSTALL_ENGINE
from worker.cli.level import Level
from worker.cli.redis_checks import redis_findings


@click.command("doctor")
@click.option("--model", metavar="DIR", help="Checkpoint directory (model.path).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of findings.")
@redis_options
def command(model: str | None, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Look at Redis, torch, the device, the kernels and the model, and say how to mend what is wrong.

    Exit code 1 if something will not work.
    """
    effective = load_command_settings(assignments, {"model.path": model, "redis.url": redis_url})
    findings = list(_findings(effective))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            _show(finding)
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
    from worker.cli.engine_checks import engine_findings  # noqa: PLC0415

    yield from engine_findings(effective)


def _show(finding: Finding) -> None:
    click.echo(f"{finding.level.value:8} {finding.check}: {finding.detail}")
    if finding.fix is not None:
        click.echo(f"{'':8} fix: {finding.fix}")
