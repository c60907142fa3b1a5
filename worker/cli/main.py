"""Entry point of `millrace`."""

from __future__ import annotations

import os
import sys

import click

from worker.cli.exit_code import ExitCode
from worker.cli.lazy_group import LazyGroup

cli = LazyGroup(
    name="millrace",
    help="LLM batch jobs on machines you own. Settings: `millrace config`; any of them with --set KEY=VALUE.",
    modules={
        "run": "worker.cli.run",
        "worker": "worker.cli.worker",
        "submit": "worker.cli.submit",
        "status": "worker.cli.status",
        "watch": "worker.cli.watch",
        "results": "worker.cli.results",
        "errors": "worker.cli.errors",
        "cancel": "worker.cli.cancel",
        "jobs": "worker.cli.jobs",
        "config": "worker.cli.config",
        "doctor": "worker.cli.doctor",
        "demo": "worker.cli.demo",
    },
)


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
        # Python flushes stdout once more at exit; there must be something that takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.FAILED
    except OSError as error:  # a full disk, say
        click.echo(f"millrace: {error}", err=True)
        code = ExitCode.FAILED
    sys.exit(code if isinstance(code, int) else ExitCode.DONE)


if __name__ == "__main__":
    main()
