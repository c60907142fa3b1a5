"""worker/COMMANDS.md, from the commands' own help."""

from __future__ import annotations

import inspect

import click

from tests.pages.markdown import page, plain, table
from worker.cli.main import cli


def commands_page() -> str:
    """Every command with its options."""
    context = click.Context(cli, info_name="millrace")
    names = cli.list_commands(context)
    rows = ((f"[`millrace {name}`](#millrace-{name})", cli.summary_of(name)) for name in names)
    return page(
        "Commands",
        "`millrace COMMAND --help` prints the same.",
        table(("command", "what it does"), rows),
        *(_section(context, name) for name in names),
    )


def _section(parent: click.Context, name: str) -> str:
    command = cli.get_command(parent, name)
    if command is None:
        raise LookupError(name)
    # A width beyond every line: nothing is wrapped, on whatever terminal.
    context = click.Context(command, info_name=name, parent=parent, terminal_width=10_000, max_content_width=10_000)
    arguments = " ".join(command.collect_usage_pieces(context))
    options = (option.get_help_record(context) for option in command.params if isinstance(option, click.Option))
    rows = ((f"`{spelling}`", plain(" ".join(meaning.split()))) for spelling, meaning in filter(None, options))
    about = plain(inspect.cleandoc(command.help or "")).replace("\n- ", "\n\\- ")  # the file, not an item of a list
    return (
        f"## millrace {name}\n\n`millrace {name} {arguments}`\n\n{about}\n\n{table(('option', 'what it does'), rows)}"
    )
