"""`millrace config`: every setting with its value and source."""

from __future__ import annotations

import json

import click

from settings import EffectiveSettings, SettingsError
from worker.cli.bad_usage import BadUsage
from worker.cli.command_error import CommandError
from worker.cli.command_settings import load_command_settings, set_option
from worker.cli.install_hint import INSTALL_ENGINE


@click.command("config")
@click.option("--model", metavar="DIR", help="Checkpoint directory (model.path): also show what follows from it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {key: {value, source}}.")
@set_option
def command(model: str | None, as_json: bool, assignments: tuple[str, ...]) -> None:
    """Show every setting: effective value, source, what is accepted.

    With a model, values that follow from the model and this machine are derived exactly as the engine derives them.
    """
    effective = load_command_settings(assignments, {"model.path": model})
    if effective.settings.model.path is not None:
        effective = _derive(effective)
    if as_json:
        click.echo(json.dumps(effective.as_json(), indent=2))
        return
    for row in effective.rows():
        unit = f" ({row.unit})" if row.unit else ""
        click.echo(f"{row.key} = {row.value_text}    [{row.source.value}]")
        click.echo(f"    {row.description}{unit} Accepted: {row.accepted}. Default: {row.default_text}.")


def _derive(effective: EffectiveSettings) -> EffectiveSettings:
    # Imported here: deriving asks torch for the device, and a producer has no torch.
    try:
        from engine.errors import CapabilityError, EngineError  # noqa: PLC0415
        from engine.loading.derived_settings import derive_settings  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise CommandError(f"what follows from model.path needs {error.name}: {INSTALL_ENGINE}") from error
    try:
        return derive_settings(effective)
    except (SettingsError, CapabilityError) as error:
        raise BadUsage(str(error)) from error
    except EngineError as error:
        raise CommandError(str(error)) from error
