"""Entry point of `millrace`."""

from __future__ import annotations

import os
import sys

import click

from worker.cli.exit_code import ExitCode
from worker.cli.lazy_command import LazyCommand
from worker.cli.lazy_group import LazyGroup

cli = LazyGroup(
    name="millrace",
    help="LLM batch jobs on machines you own. `millrace config` shows every setting; --set KEY=VALUE sets one.",
    lazy_commands={
        "run": LazyCommand("worker.cli.run", "Run request lines offline: no Redis, the same engine."),
        "worker": LazyCommand("worker.cli.worker", "Take jobs from Redis and run them on the model."),
        "submit": LazyCommand("worker.cli.submit", "Submit the request lines of one or more files as one job."),
        "status": LazyCommand("worker.cli.status", "Show a job's state, counts and tokens."),
        "watch": LazyCommand("worker.cli.watch", "Follow a job until it ends."),
        "results": LazyCommand(
            "worker.cli.results", "Print a job's records, as they were written or as the lines stood."
        ),
        "errors": LazyCommand("worker.cli.errors", "Print the records of requests without an answer."),
        "cancel": LazyCommand("worker.cli.cancel", "Cancel a job; finished records stay."),
        "jobs": LazyCommand("worker.cli.jobs", "List jobs, newest first."),
        "config": LazyCommand("worker.cli.config", "Show every setting: value, source, what is accepted."),
        "doctor": LazyCommand(
            "worker.cli.doctor", "Check Redis, its workers, this machine and the model; say how to mend what is wrong."
        ),
        "acl": LazyCommand("worker.cli.acl", "Print the Redis users that producers and workers need."),
        "flower": LazyCommand("worker.cli.flower", "Serve Celery's own page about the workers, behind a password."),
        "demo": LazyCommand(
            "worker.cli.demo", "Redis, a worker and 300 support tickets on this machine, from nothing."
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
        # Python flushes stdout once more at exit; there must be something that takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.FAILED
    except OSError as error:  # a full disk, say
        click.echo(f"millrace: {error}", err=True)
        code = ExitCode.FAILED
    sys.exit(code if isinstance(code, int) else ExitCode.DONE)


if __name__ == "__main__":
    main()
