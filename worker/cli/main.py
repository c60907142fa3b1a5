"""Runs `millrace`: lists its commands, and imports each only when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import click
from click.shell_completion import CompletionItem

from worker.cli.exit_codes import CommandError, ExitCode
from worker.doctor.report import INSTALL_ENGINE

INSTALL_SERVE = 'pip install -e ".[serve]" in the checkout'
_OF_SERVE = ("starlette", "uvicorn", "python_multipart", "h11")
INSTALL_MONITOR = 'pip install -e ".[monitor]" in the checkout'


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is, and its line in the list of commands."""

    module: str  # holds a click.Command of the command's name
    summary: str


class LazyGroup(click.Group):
    """Commands by name, none of which is imported before it is used, not even for the list of `millrace --help`.

    `millrace submit` must run in a producer without torch, and `millrace run` should not pay for celery.
    """

    def __init__(self, *, lazy_commands: Mapping[str, LazyCommand], name: str, help: str) -> None:
        super().__init__(name=name, help=help)
        self._lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the list."""
        return list(self._lazy_commands)

    def summary_of(self, name: str) -> str:
        """A command's line in the list. Raises KeyError if there is none."""
        return self._lazy_commands[name].summary

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them: some need packages that a producer does not have."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self._lazy_commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names for the shell to complete, without importing the commands: that takes longer than a key may."""
        names = [
            CompletionItem(name, help=command.summary)
            for name, command in self._lazy_commands.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raises CommandError if it imports something, such as torch, that is not installed."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise CommandError(_missing(ctx.invoked_subcommand, error)) from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command. Raises CommandError where its module is not installed."""
        lazy = self._lazy_commands.get(cmd_name)
        if lazy is None:
            return None
        try:
            module = importlib.import_module(lazy.module)
        except ModuleNotFoundError as error:
            if error.name == lazy.module:
                raise CommandError(f"{cmd_name} is not part of this installation") from error
            raise CommandError(_missing(cmd_name, error)) from error
        command = getattr(module, cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.module}.{cmd_name} is {command!r}, not a click command")
        return command


def _missing(command: str | None, error: ModuleNotFoundError) -> str:
    hint = INSTALL_MONITOR if error.name == "flower" else INSTALL_ENGINE
    hint = INSTALL_SERVE if (error.name or "").partition(".")[0] in _OF_SERVE else hint
    return f"{command} needs {error.name}, which is not installed: {hint}"


cli = LazyGroup(
    name="millrace",
    help="LLM batch jobs on machines you own. `millrace config` shows every setting; --set KEY=VALUE sets one.",
    lazy_commands={
        "run": LazyCommand("worker.cli.run", "Run request lines offline: no Redis, the same engine."),
        "worker": LazyCommand("worker.cli.worker", "Take jobs from Redis and run them on the model."),
        "submit": LazyCommand("worker.cli.submit", "Submit the request lines of one or more files as one job."),
        "status": LazyCommand("worker.cli.jobs", "Show a job's state, counts and tokens."),
        "watch": LazyCommand("worker.cli.jobs", "Follow a job until it ends."),
        "results": LazyCommand("worker.cli.jobs", "Print a job's records, as they were written or as the lines stood."),
        "errors": LazyCommand("worker.cli.jobs", "Print the records of requests without an answer."),
        "cancel": LazyCommand("worker.cli.jobs", "Cancel a job; finished records stay."),
        "retry": LazyCommand("worker.cli.jobs", "Submit the lines of a job that failed as a new job."),
        "delete": LazyCommand("worker.cli.jobs", "Delete a job that has ended, with its records."),
        "jobs": LazyCommand("worker.cli.jobs", "List jobs, newest first."),
        "queue": LazyCommand("worker.cli.queue", "Show how many prompts wait for which model, also with no worker up."),
        "usage": LazyCommand("worker.cli.usage", "Show prompts and tokens used, by tenant, model and day."),
        "config": LazyCommand("worker.cli.admin", "Show every setting: value, source, what is accepted."),
        "doctor": LazyCommand(
            "worker.cli.admin", "Check Redis, its workers, this machine and the model; say how to mend what is wrong."
        ),
        "serve": LazyCommand("worker.cli.serve", "Serve OpenAI's Files and Batches API over HTTP."),
        "keys": LazyCommand("worker.cli.keys", "Create, list and revoke the keys of `millrace serve`."),
        "callbacks": LazyCommand("worker.cli.callbacks", "List, retry and drop callbacks of jobs that have ended."),
        "quantize": LazyCommand("worker.cli.quantize", "Write a checkpoint with weights of 4 or 8 bits."),
        "acl": LazyCommand("worker.cli.admin", "Print the Redis users that producers and workers need."),
        "flower": LazyCommand("worker.monitor.flower", "Serve Celery's own page about the workers, behind a password."),
        "demo": LazyCommand(
            "worker.demo.run", "Redis, a worker and 300 support tickets on this machine, from nothing."
        ),
    },
)


click.version_option(package_name="millrace")(cli)


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        code = cli.main(prog_name="millrace", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.exceptions.Abort:  # Ctrl-C
        click.echo("millrace: interrupted", err=True)
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        # Python flushes stdout once more at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.FAILED
    except OSError as error:  # a full disk, say
        click.echo(f"millrace: {error}", err=True)
        code = ExitCode.FAILED
    sys.exit(code if isinstance(code, int) else ExitCode.DONE)


if __name__ == "__main__":
    main()
