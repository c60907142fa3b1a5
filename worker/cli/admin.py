"""`millrace config`, `doctor` and `acl`: the settings in force, what is wrong, and the users of a Redis."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from settings import EffectiveSettings
from worker.acl import (
    ADMIN,
    FLOWER,
    PRODUCER,
    SERVER,
    WORKER,
    UnusablePassword,
    acl_file,
    generate_password,
    read_password,
)
from worker.cli.exit_codes import BadUsage, CommandError, ExitCode, printable, refusals_in_a_line
from worker.cli.files import open_output
from worker.cli.options import load_command_settings, redis_options, set_option
from worker.cli.progress import coloured
from worker.doctor.redis import OLDEST_REDIS, redis_findings
from worker.doctor.report import INSTALL_ENGINE, Finding, Level, summary
from worker.registry.lua import library

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "red"}

_USERS = {"producer": PRODUCER, "worker": WORKER, "server": SERVER, "flower": FLOWER, "admin": ADMIN}


@click.command("config")
@click.option("--model", metavar="DIR", help="Checkpoint directory (model.path): also show what follows from it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {key: {value, source}}.")
@set_option
def config(model: str | None, as_json: bool, assignments: tuple[str, ...]) -> None:
    """Show every setting: effective value, source, what is accepted.

    With a model, values that follow from the model and this machine are derived exactly as the engine derives them,
    and a last line says what its weights take, in which scheme, and how many tokens' KV fits (in JSON: doctor --json).
    """
    effective = load_command_settings(assignments, {"model.path": model})
    fit = None
    if effective.settings.model.path is not None:
        effective, fit = _derive(effective)
    if as_json:
        click.echo(json.dumps(effective.as_json(), indent=2))
        return
    for row in effective.rows():
        unit = f" ({row.unit})" if row.unit else ""
        click.echo(f"{row.key} = {row.value_text}    [{row.source.value}]")
        click.echo(f"    {row.description}{unit} Accepted: {row.accepted}. Default: {row.default_text}.")
    if fit is not None:
        click.echo(fit.text)


def _derive(effective: EffectiveSettings) -> tuple[EffectiveSettings, Finding | None]:
    """What follows from the model, and what fits."""
    # Imported here: deriving needs torch, which a producer does not have.
    try:
        from engine.loading.derived_settings import derive_settings  # noqa: PLC0415
        from worker.doctor.model import fit_finding  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CommandError(f"what follows from model.path needs {error.name}: {INSTALL_ENGINE}") from error
    with refusals_in_a_line():
        derived = derive_settings(effective)
        return derived, fit_finding(derived)


@click.command("doctor")
@click.option("--model", metavar="DIR", help="Checkpoint directory (model.path).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of findings.")
@click.option(
    "--quantization-error", is_flag=True,
    help="Also load the model and compare it, with engine.quantization set, with its full weights.",
)  # fmt: skip
@redis_options
def doctor(
    model: str | None, as_json: bool, quantization_error: bool, redis_url: str | None, assignments: tuple[str, ...]
) -> None:
    """Look at Redis, the workers, this machine and the model, and say how to mend what is wrong.

    With a model this machine is to be a worker, else a producer. Nothing is changed, and no weight is loaded unless
    asked for. Exit code 1 if something will not work; a warning is not that.
    """
    effective = load_command_settings(assignments, {"model.path": model, "redis.url": redis_url})
    if quantization_error and effective.settings.model.path is None:
        raise BadUsage("--quantization-error: model.path is not set; accepted: with --model DIR")
    findings = []
    for finding in _findings(effective, with_quantization_error=quantization_error):
        findings.append(finding)
        if not as_json:
            click.echo(_coloured(finding))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        click.echo(summary(findings))
    if any(finding.level is Level.FAILED for finding in findings):
        sys.exit(ExitCode.FAILED)


def _coloured(finding: Finding) -> str:
    """The finding's text, with its level in a colour."""
    level = finding.level.value
    # Names of models and workers are others' words.
    fix = None if finding.fix is None else printable(finding.fix)
    shown = dataclasses.replace(finding, detail=printable(finding.detail), fix=fix)
    return coloured(level, _COLOURS[finding.level]) + shown.text.removeprefix(level)


def _findings(effective: EffectiveSettings, *, with_quantization_error: bool) -> Iterator[Finding]:
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
    # Imported here: a producer has no torch, and doctor must say so.
    from worker.doctor.model import engine_findings, quantization_findings  # noqa: PLC0415  # torch comes with it

    yield from engine_findings(effective)
    if with_quantization_error:
        yield from quantization_findings(effective)


def _print_functions(context: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        click.echo(library(), nl=False)
        context.exit()


@click.command("acl")
@click.option(
    "--functions", is_flag=True, is_eager=True, expose_value=False, callback=_print_functions,
    help="Print this version's functions in place of it, for `redis-cli -x FUNCTION LOAD REPLACE`.",
)  # fmt: skip
@click.option("--producer-password-file", "producer", required=True, metavar="FILE", help="Of millrace-producer.")
@click.option("--worker-password-file", "worker", required=True, metavar="FILE", help="Of millrace-worker.")
@click.option("--server-password-file", "server", metavar="FILE", help="Of millrace-server, that of `millrace serve`.")
@click.option("--flower-password-file", "flower", metavar="FILE", help="Of millrace-flower, who hears Celery's events.")
@click.option("--admin-password-file", "admin", metavar="FILE", help="Of millrace-admin, who may do everything.")
@click.option(
    "--callback-queue", "queues", multiple=True, metavar="NAME",
    help="A Celery queue to which workers and servers may send callbacks (limits.callback_queues). Repeatable.",
)  # fmt: skip
@click.option("--generate", is_flag=True, help="Make a password where there is no such file.")
@click.option("--redis-version", default="8.0", show_default=True, metavar="X.Y", help="Of the server.")
@click.option("-o", "--output", default="-", metavar="FILE", help="The ACL file; - is stdout.")
def acl(generate: bool, redis_version: str, output: str, queues: tuple[str, ...], **files: str | None) -> None:
    """Print an ACL file (redis-server --aclfile) with one user for producers and one for workers.

    Each may do its work and nothing else; the default user is off. Passwords come from files; the ACL file holds their
    SHA-256. From Redis 7.0 on producers call functions, which a worker loads at its start.
    """
    version = _version(redis_version)
    for queue in queues:
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", queue) is None:
            raise BadUsage(f"--callback-queue {queue}: accepted: 1 to 100 letters, digits, ., _ and - (ASCII)")
    try:
        passwords = {
            user: _password(Path(file), generate) for name, user in _USERS.items() if (file := files[name]) is not None
        }
    except UnusablePassword as error:
        raise BadUsage(str(error)) from error
    if len(set(passwords.values())) < len(passwords):
        raise BadUsage("two users have the same password; accepted: one for each")
    with open_output(output) as target:
        target.write(acl_file(passwords, version, queues).encode("ascii"))


def _password(file: Path, generate: bool) -> str:
    if generate:
        generate_password(file)
    return read_password(file)


def _version(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})(\.[0-9]+)*", text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST_REDIS:
        oldest = ".".join(map(str, OLDEST_REDIS))
        raise BadUsage(f"--redis-version {text}: accepted: {oldest} or later, such as 7.4")
    return version
