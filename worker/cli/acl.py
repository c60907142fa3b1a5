"""`millrace acl`: the users of a Redis."""

from __future__ import annotations

import re
from pathlib import Path

import click

from worker.acl.acl_file import acl_file
from worker.acl.errors import UnusablePassword
from worker.acl.password_file import generate_password, read_password
from worker.acl.users import ADMIN, FLOWER, PRODUCER, WORKER
from worker.cli.bad_usage import BadUsage
from worker.cli.data_files import open_output
from worker.doctor.server_version import OLDEST_REDIS

_USERS = {"producer": PRODUCER, "worker": WORKER, "flower": FLOWER, "admin": ADMIN}


@click.command("acl")
@click.option("--producer-password-file", "producer", required=True, metavar="FILE", help="Of millrace-producer.")
@click.option("--worker-password-file", "worker", required=True, metavar="FILE", help="Of millrace-worker.")
@click.option("--flower-password-file", "flower", metavar="FILE", help="Of millrace-flower, who hears Celery's events.")
@click.option("--admin-password-file", "admin", metavar="FILE", help="Of millrace-admin, who may do everything.")
@click.option("--generate", is_flag=True, help="Make a password where there is no such file.")
@click.option("--redis-version", default="8.0", show_default=True, metavar="X.Y", help="Of the server.")
@click.option("-o", "--output", default="-", metavar="FILE", help="The ACL file; - is stdout.")
def command(generate: bool, redis_version: str, output: str, **files: str | None) -> None:
    """Print an ACL file (redis-server --aclfile) with one user for producers and one for workers.

    Each may do its work and nothing else; the default user is off. Passwords come from files; the ACL file holds their
    SHA-256.
    """
    version = _version(redis_version)
    try:
        passwords = {
            user: _password(Path(file), generate) for name, user in _USERS.items() if (file := files[name]) is not None
        }
    except UnusablePassword as error:
        raise BadUsage(str(error)) from error
    if len(set(passwords.values())) < len(passwords):
        raise BadUsage("two users have the same password; accepted: one for each")
    with open_output(output) as target:
        target.write(acl_file(passwords, version).encode("ascii"))


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
