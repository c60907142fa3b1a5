"""The command line as a whole: its commands, its options, its errors."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest
from click.testing import CliRunner

from tests.support.redis_servers import free_port
from tests.support.request_lines import job_status
from tests.support.workers import COMMAND, ROOT, millrace
from worker.cli import jobs as errors
from worker.cli.main import LazyCommand, LazyGroup, cli
from worker.runtime.build import package_version
from worker.schemas import JobState, JobStatus

# What a producer's installation does not have.
BARE = """
import sys
for name in ("torch", "triton", "numpy", "safetensors", "tokenizers", "jinja2"):
    sys.modules[name] = None
from worker.cli.main import main
main()
"""


BARE_CLI = "from worker.cli.main import main; main()"


def run_code(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, check=False, cwd=ROOT)


def test_a_producers_command_loads_no_torch() -> None:
    modules = ("main", "submit", "jobs", "follow", "admin")
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(f'worker.cli.{module}')\n"
        "    bad = {'torch', 'triton', 'engine', 'kernels'} & {name.partition('.')[0] for name in sys.modules}\n"
        "    assert not bad, (module, bad)\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_is_refused_is_refused_before_torch_is_imported() -> None:
    refused = (
        ["run", "-i", __file__, "-o", "-", "--set", "engine.max_num_seqs=lots"],
        ["run", "-i", "nowhere.jsonl", "-o", "-"],
        ["run", "nowhere.jsonl", "-o", "-"],
        ["run", "-o", "-"],
        ["run", __file__, "-o", "-", "--max-failed", "most"],
        ["run", "-i", __file__, "-o", "/nowhere/out.jsonl"],
        ["run", "-i", __file__, "-o", "-", "--profile", "/nowhere/trace.json"],
        ["worker", "--concurrency", "many"],
        ["worker", "--redis-url", "redis://redis.example:6379/0"],
        ["config", "--model", "m", "--set", "engine.dtype=int3"],
        ["doctor", "--set", "nothing=1"],
    )
    code = (
        "import sys; from click.testing import CliRunner; from worker.cli.main import cli\n"
        f"for arguments in {refused!r}:\n"
        "    done = CliRunner().invoke(cli, arguments)\n"
        "    assert done.exit_code == 2, (arguments, done.output)\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "name", ["run", "worker", "submit", "status", "watch", "results", "errors", "cancel", "jobs", "config", "doctor"]
)
def test_every_command_has_help_and_takes_settings(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])

    assert result.exit_code == 0
    assert "--set" in result.output


@pytest.mark.parametrize(
    "name", ["run", "submit", "status", "watch", "results", "errors", "cancel", "jobs", "config", "doctor"]
)
def test_commands_that_tell_something_tell_it_as_json_too(name: str) -> None:
    assert "--json" in CliRunner().invoke(cli, [name, "--help"]).output


@pytest.mark.parametrize(
    ("words", "number", "completed"),
    [
        ("millrace re", 1, ["plain,results", "plain,retry"]),
        ("millrace submit x", 2, ["file,x"]),
        ("millrace run --mod", 2, ["plain,--model"]),
        ("millrace run --model m", 3, ["dir,m"]),
    ],
)
def test_a_shell_completes_commands_options_and_files(words: str, number: int, completed: list[str]) -> None:
    typed = {"COMP_WORDS": words, "COMP_CWORD": str(number), "_MILLRACE_COMPLETE": "bash_complete"}

    done = run_code(BARE_CLI, typed)

    assert done.stdout.decode().splitlines() == completed, done.stderr.decode()


def test_the_names_of_commands_are_completed_without_importing_them() -> None:
    typed = {"COMP_WORDS": "millrace ", "COMP_CWORD": "1", "_MILLRACE_COMPLETE": "bash_complete"}

    done = run_code(BARE, typed)

    assert done.stdout.decode().split() == [f"plain,{name}" for name in cli.list_commands(click.Context(cli))]


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
    return LazyGroup(name="g", help="", lazy_commands={"thing": LazyCommand(path, "Does a thing.")})


def test_it_tells_its_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])

    assert result.exit_code == 0
    assert result.stdout == f"millrace, version {package_version()}\n"


def test_a_command_that_is_not_installed_says_so() -> None:
    result = CliRunner().invoke(group_with("worker.cli.nothing_like_this"), ["thing"])

    assert result.exit_code == 1
    assert "thing is not part of this installation" in result.output


def test_a_command_without_its_packages_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "worker.doctor.machine", raising=False)

    result = CliRunner().invoke(group_with("worker.doctor.machine"), ["thing"])

    assert result.exit_code == 1
    assert 'thing needs torch, which is not installed: pip install -e ".[engine]" in the checkout' in result.output


def test_a_package_that_is_missing_on_the_way_is_said_the_same_way() -> None:
    result = CliRunner().invoke(group_with(__name__), ["thing"])

    assert result.exit_code == 1
    assert "thing needs no_such_package, which is not installed: " in result.output


@click.command("thing")
def thing() -> None:
    importlib.import_module("no_such_package")


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2)])
def test_the_list_of_commands_needs_no_engine(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", BARE, *arguments], capture_output=True, check=False, cwd=ROOT)

    listed = (done.stdout + done.stderr).decode()
    assert done.returncode == code, listed
    for name in ("run", "worker", "submit", "demo"):
        assert f"\n  {name} " in listed
    assert "Run request lines offline" in listed


def test_a_command_that_needs_the_engine_says_so_without_it() -> None:
    done = subprocess.run([sys.executable, "-c", BARE, "run", "--help"], capture_output=True, check=False, cwd=ROOT)

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert b'pip install -e ".[engine]"' in done.stderr


def test_no_text_sends_anybody_to_the_package_index() -> None:
    """There our name belongs to a stranger's project."""
    wrong = re.compile(r"pip install \S?millrace(?!\S* @ )")
    for path in [ROOT / "README.md", *ROOT.glob("worker/**/*.py"), *ROOT.glob("settings/**/*.py")]:
        assert not wrong.search(path.read_text()), path


@pytest.mark.parametrize("name", ["status", "watch", "results", "errors", "cancel", "submit", "jobs"])
def test_a_producers_command_refuses_a_setting_it_does_not_read(name: str) -> None:
    arguments = [] if name == "jobs" else ["x"]

    result = CliRunner().invoke(cli, [name, *arguments, "--set", "worker.shard_size=7"])

    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert "worker.shard_size" in line
    assert line.endswith("accepted: redis.*, limits.*, log.* or tracing.*")


@pytest.mark.usefixtures("short_pauses")
def test_a_producers_command_takes_the_settings_it_reads() -> None:
    url = f"redis.url=redis://127.0.0.1:{free_port()}/0"

    result = CliRunner().invoke(cli, ["jobs", "--set", url, "--set", "limits.max_n=4", "--set", "log.level=error"])

    assert result.exit_code == 1  # and not 2: only that Redis is missing
    assert "Redis at " in result.stderr


class FailedJob:
    """A client of one job, which failed before any of its requests had a record."""

    def find(self, name: str) -> str:
        return name

    def status(self, _job_id: str) -> JobStatus:
        return job_status(JobState.FAILED, error="line 2: not JSON")

    def pages(self, _job_id: str, _cursor: str, *, order: str) -> Iterator[Iterator[dict[str, object]]]:
        assert order == "completion"
        return iter([self.errors(_job_id)])

    def errors(self, _job_id: str) -> Iterator[dict[str, object]]:
        return iter(())


@contextmanager
def _client(_effective: object) -> Iterator[FailedJob]:
    yield FailedJob()


def test_of_a_job_that_failed_without_records_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "job_client", _client)

    done = CliRunner().invoke(errors.errors, ["s0-1"])

    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr == "the job itself failed: line 2: not JSON\n"
