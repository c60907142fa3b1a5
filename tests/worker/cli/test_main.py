from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from tests.support.millrace import COMMAND, ROOT, millrace
from worker.cli.lazy_group import LazyGroup
from worker.cli.main import cli


@pytest.mark.parametrize(
    "module", ["main", "submit", "status", "watch", "results", "errors", "cancel", "jobs", "config"]
)
def test_a_producers_command_loads_no_torch(module: str) -> None:
    code = (
        f"import sys, worker.cli.{module}; "
        "bad = {'torch', 'triton', 'engine', 'kernels'} & {name.partition('.')[0] for name in sys.modules}; "
        "assert not bad, bad"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "name", ["run", "worker", "submit", "status", "watch", "results", "errors", "cancel", "jobs", "config", "doctor"]
)
def test_every_command_has_help_and_takes_any_setting(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])

    assert result.exit_code == 0
    assert "--set" in result.output


@pytest.mark.parametrize("name", ["status", "watch", "results", "errors", "cancel", "jobs", "config", "doctor"])
def test_commands_that_tell_something_tell_it_as_json_too(name: str) -> None:
    assert "--json" in CliRunner().invoke(cli, [name, "--help"]).output


def test_an_unknown_command_is_bad_usage() -> None:
    done = millrace("sbumit")

    assert done.returncode == 2
    assert b"sbumit" in done.stderr


def test_a_missing_argument_is_bad_usage() -> None:
    assert millrace("status").returncode == 2


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    with subprocess.Popen([*COMMAND, "config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()

        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == b""


def test_a_full_disk_is_one_line_and_exit_1() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "config"], stdout=full, stderr=subprocess.PIPE, check=False)

    assert done.returncode == 1
    assert done.stderr.startswith(b"millrace: ")


def group_with(path: str) -> click.Command:
    return LazyGroup(name="g", help="", modules={"thing": path})


def test_a_command_that_is_not_installed_says_so() -> None:
    result = CliRunner().invoke(group_with("worker.cli.nothing_like_this"), ["thing"])

    assert result.exit_code == 1
    assert "thing is not part of this installation" in result.output


def test_a_command_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "worker.cli.engine_checks", raising=False)

    result = CliRunner().invoke(group_with("worker.cli.engine_checks"), ["thing"])

    assert result.exit_code == 1
    assert "thing needs torch, which is not installed: pip install 'millrace[engine]'" in result.output
