"""The commands about jobs, against a real Redis in which no worker runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.redis_servers import free_port
from tests.support.registry import TestRegistry, ended_job
from tests.support.request_lines import completion_line
from worker.cli.main import cli
from worker.client import BatchClient
from worker.schemas import SubmitOptions

UNKNOWN = "s0-00000000-0000-7000-8000-000000000000"


class Shell:
    """Commands on one Redis."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, [*arguments, "--redis-url", self.redis_url])

    def submit(self, path: Path, *options: str) -> str:
        result = self("submit", str(path), *options)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()


@pytest.fixture
def shell(redis_url: str) -> Shell:
    return Shell(redis_url)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(completion_line(custom_id=f"line {number}") for number in range(3)) + b"\n\n")
    return path


def test_submit_prints_the_jobs_id_and_nothing_else(shell: Shell, requests: Path) -> None:
    job_id = shell.submit(requests)

    with BatchClient(shell.redis_url) as client:
        assert client.status(job_id).request_counts.total == 3


def test_submit_passes_its_options_on(shell: Shell, requests: Path) -> None:
    job_id = shell.submit(
        requests,
        "--priority",
        "2",
        "--deadline",
        "30m",
        "--tenant",
        "blue",
        "--metadata",
        "run=7",
        "--metadata",
        "x=a=b",
    )

    with BatchClient(shell.redis_url) as client:
        job = client.status(job_id)
    assert (job.priority, job.tenant, job.metadata) == (2, "blue", {"run": "7", "x": "a=b"})
    assert job.expires_at == pytest.approx(job.created_at + 1800, abs=5)


def test_the_same_idempotency_key_is_the_same_job(shell: Shell, requests: Path) -> None:
    first = shell.submit(requests, "--idempotency-key", "k")

    assert shell.submit(requests, "--idempotency-key", "k") == first
    requests.write_bytes(completion_line(custom_id="another"))
    refused = shell("submit", str(requests), "--idempotency-key", "k")
    assert refused.exit_code == 2
    assert f"idempotency_key 'k' is of job {first}, which has other lines; accepted: the same again" in refused.output


@pytest.mark.parametrize(
    "options",
    [
        ["--priority", "10"], ["--deadline", "soon"], ["--deadline", "0"], ["--tenant", "not a name"],
        ["--metadata", "novalue"], ["--metadata", "a=1", "--metadata", "a=2"], ["--metadata", "k=" + "v" * 513],
        ["--set", "limits.max_prompts_per_job=2"], ["--set", "redis.socket_timeout_s=nonsense"], ["--set", "nonsense"],
    ],
)  # fmt: skip
def test_bad_options_are_exit_2_and_no_job(shell: Shell, requests: Path, options: list[str]) -> None:
    result = shell("submit", str(requests), *options)

    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    with BatchClient(shell.redis_url) as client:
        assert client.jobs() == []


def test_an_empty_or_missing_file_is_exit_2(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")

    assert shell("submit", str(tmp_path / "empty.jsonl")).exit_code == 2
    assert shell("submit", str(tmp_path / "missing.jsonl")).exit_code == 2


def test_no_job_is_submitted_if_its_results_cannot_be_written(shell: Shell, requests: Path) -> None:
    for output in (str(requests), "no/such/directory/out.jsonl"):
        assert shell("submit", str(requests), "-o", output).exit_code == 2

    with BatchClient(shell.redis_url) as client:
        assert client.jobs() == []
    assert requests.read_bytes()


def test_status_tells_the_same_in_words_and_as_json(shell: Shell, requests: Path) -> None:
    job_id = shell.submit(requests)

    words, as_json = shell("status", job_id), shell("status", job_id, "--json")

    assert (words.exit_code, as_json.exit_code) == (0, 0)
    assert f"job        {job_id}" in words.stdout
    assert "requests   3: 0 completed, 0 failed" in words.stdout
    status = json.loads(as_json.stdout)
    assert (status["id"], status["status"], status["request_counts"]["total"]) == (job_id, "validating", 3)
    assert status["object"] == "batch"
    assert type(status["created_at"]) is int
    assert status["usage"]["input_tokens_details"] == {"cached_tokens": 0}


def test_a_cancelled_job_keeps_one_record_a_line(shell: Shell, requests: Path, tmp_path: Path) -> None:
    job_id = shell.submit(requests)

    cancelled = shell("cancel", job_id, "--json")

    assert cancelled.exit_code == 0
    assert json.loads(cancelled.stdout)["status"] == "cancelled"
    for command in ("results", "errors"):
        output = tmp_path / f"{command}.jsonl"
        assert shell(command, job_id, "-o", str(output)).exit_code == 0
        records = [json.loads(line) for line in output.read_text().splitlines()]
        assert {record["custom_id"] for record in records} == {"line 0", "line 1", "line 2"}
        assert {record["error"]["code"] for record in records} == {"batch_cancelled"}
        assert shell(command, job_id, "--json").stdout == output.read_text()


@pytest.mark.parametrize("command", [["status"], ["watch"], ["watch", "--json"], ["results", "--follow"]])
def test_a_cancelled_job_is_exit_1_to_whoever_waits_for_it(shell: Shell, requests: Path, command: list[str]) -> None:
    job_id = shell.submit(requests)
    shell("cancel", job_id)

    result = shell(*command, job_id)

    assert result.exit_code == 1
    assert f"millrace: job {job_id} was cancelled" in result.stderr


HOSTILE = "x\nstatus     completed\x1b]52;c;cm0gLXJm\x07\x9b2J\u202e"
SHOWN = r"x\nstatus     completed\x1b]52;c;cm0gLXJm\x07\x9b2J\u202e"


@pytest.mark.parametrize("command", [["status"], ["watch"], ["cancel"]])
def test_what_users_wrote_forges_no_line_and_drives_no_terminal(
    shell: Shell, registry: TestRegistry, command: list[str]
) -> None:
    job_id = registry.submit([b"x"], SubmitOptions(metadata={"a\x07": HOSTILE}))
    for name, value in {"st": "failed", "reason": HOSTILE, "tenant": HOSTILE, "model": HOSTILE}.items():
        registry.redis.hset(registry.keys.job(job_id), name, value)  # by whoever may write to Redis

    done = shell(*command, job_id)

    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == (
        ["job", "status", "model", "requests", "shards", "tokens", "priority", "tenant", "metadata", "created"]
    )
    assert lines[1:3] == [f"status     failed: {SHOWN}", f"model      {SHOWN}"]
    assert lines[7:9] == [f"tenant     {SHOWN}", rf"metadata   a\x07={SHOWN}"]
    assert done.output.replace("\n", "").isprintable()
    assert not [line for line in done.stderr.splitlines() if line.startswith("status")]


def test_the_list_of_jobs_shows_names_as_they_are_written(shell: Shell, registry: TestRegistry) -> None:
    job_id = registry.submit([b"x"], SubmitOptions(metadata={"a": HOSTILE}))
    registry.redis.hset(registry.keys.job(job_id), "tenant", HOSTILE)

    lines = shell("jobs").stdout.splitlines()

    assert len(lines) == 2
    assert SHOWN in lines[1]
    [job] = json.loads(shell("jobs", "--json").stdout)
    assert (job["tenant"], job["metadata"]) == (HOSTILE, {"a": HOSTILE})
    assert json.loads(shell("status", job_id, "--json").stdout)["metadata"] == {"a": HOSTILE}


def test_jobs_lists_every_job_newest_first(shell: Shell, requests: Path) -> None:
    ids = [shell.submit(requests) for _ in range(2)]

    listed = [job["id"] for job in json.loads(shell("jobs", "--json").stdout)]
    table = shell("jobs").stdout.splitlines()

    assert sorted(listed) == sorted(ids)
    assert [row.split()[0] for row in table[1:]] == listed


def test_a_cancelled_jobs_lines_are_retried_as_a_job_of_their_own(shell: Shell, requests: Path) -> None:
    job_id = shell.submit(requests, "--tenant", "blue")
    shell("cancel", job_id)

    retried = shell("retry", job_id, "--priority", "1", "--deadline", "30m")

    assert (retried.exit_code, retried.stderr) == (0, "")
    with BatchClient(shell.redis_url) as client:
        job = client.status(retried.stdout.strip())
    assert (job.request_counts.total, job.priority, job.tenant) == (3, 1, "blue")
    assert job.expires_at == pytest.approx(job.created_at + 1800, abs=5)


def test_a_retry_says_which_lines_it_leaves_out(shell: Shell, registry: TestRegistry) -> None:
    job_id = ended_job(registry, {0: ("line-1", "internal_error"), 4: ("b", "duplicate_custom_id")})

    retried = shell("retry", job_id)

    assert retried.exit_code == 0
    assert retried.stderr == "1 of 2 lines left out: an earlier line has their custom_id\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_deleted_job_is_gone(shell: Shell, requests: Path, as_json: bool) -> None:
    job_id = shell.submit(requests)
    shell("cancel", job_id)

    deleted = shell("delete", job_id, *["--json"] * as_json)

    assert deleted.exit_code == 0
    if as_json:
        assert json.loads(deleted.stdout) == {"id": job_id, "object": "batch", "deleted": True}
    else:
        assert deleted.stdout == f"deleted {job_id} and its 3 records\n"
    assert shell("status", job_id).exit_code == 1
    assert json.loads(shell("jobs", "--json").stdout) == []


@pytest.mark.parametrize("command", ["retry", "delete"])
def test_a_job_that_runs_is_neither_retried_nor_deleted(shell: Shell, requests: Path, command: str) -> None:
    job_id = shell.submit(requests)

    done = shell(command, job_id)

    assert (done.exit_code, done.stdout) == (1, "")
    assert f"job {job_id} is validating; accepted: a job that has ended (`millrace cancel` ends one)" in done.stderr
    assert shell("status", job_id).exit_code == 0


def listed(shell: Shell, *options: str) -> list[str]:
    return [job["id"] for job in json.loads(shell("jobs", "--json", *options).stdout)]


def test_jobs_are_listed_by_what_is_asked_for(shell: Shell, requests: Path) -> None:
    mine, theirs = shell.submit(requests, "--tenant", "me"), shell.submit(requests, "--tenant", "them")
    shell("cancel", theirs)

    assert listed(shell, "--tenant", "me") == listed(shell, "--state", "validating") == [mine]
    assert listed(shell, "--state", "cancelled", "--state", "expired") == [theirs]
    assert listed(shell, "--since", "1h", "--tenant", "them") == [theirs]
    assert len(listed(shell, "--limit", "1")) == 1
    assert listed(shell, "--model", "nobody's") == []
    assert shell("jobs", "--state", "lost").exit_code == 2


def test_a_job_is_named_by_the_beginning_of_its_id_or_as_the_latest(shell: Shell, requests: Path) -> None:
    job_id = shell.submit(requests)

    for name in (job_id, job_id[:12], job_id.removeprefix("s0-")[:12], "latest"):
        assert json.loads(shell("status", name, "--json").stdout)["id"] == job_id


def test_a_beginning_of_two_ids_is_exit_2_and_names_them(shell: Shell, requests: Path) -> None:
    ids = [shell.submit(requests), shell.submit(requests)]

    done = shell("cancel", "s0-0")

    assert done.exit_code == 2
    assert all(job_id in done.stderr for job_id in ids)
    assert set(listed(shell, "--state", "validating")) == set(ids)


@pytest.mark.parametrize("name", ["latest", "s0-0", "ffff"])
def test_where_no_job_is_called_so_it_is_exit_1(shell: Shell, name: str) -> None:
    done = shell("status", name)

    assert done.exit_code == 1
    assert f"no job {name}" in done.stderr


@pytest.mark.parametrize("command", ["status", "watch", "results", "errors", "cancel", "retry", "delete"])
def test_a_job_that_is_not_there_is_exit_1(shell: Shell, command: str) -> None:
    result = shell(command, UNKNOWN)

    assert result.exit_code == 1
    assert UNKNOWN in result.stderr


@pytest.mark.parametrize("command", ["results", "errors"])
def test_a_job_that_is_not_there_leaves_the_output_file_alone(shell: Shell, tmp_path: Path, command: str) -> None:
    output = tmp_path / "old.jsonl"
    output.write_text("kept")

    assert shell(command, UNKNOWN, "-o", str(output)).exit_code == 1

    assert output.read_text() == "kept"


@pytest.mark.parametrize("command", ["status", "watch", "results", "errors", "cancel", "retry", "delete"])
def test_what_is_no_job_id_is_exit_2(shell: Shell, command: str) -> None:
    assert shell(command, "../etc").exit_code == 2


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("command", [["jobs"], ["status", UNKNOWN], ["submit", "requests.jsonl"]])
def test_an_unreachable_redis_is_one_line_and_exit_1(requests: Path, command: list[str]) -> None:
    url = f"redis://:hunter2@127.0.0.1:{free_port()}/0"

    result = CliRunner().invoke(cli, [*command, "--redis-url", url])

    assert result.exit_code == 1
    assert result.stderr.startswith("millrace: Redis at redis://")
    assert "hunter2" not in result.output
    assert requests.exists()


@pytest.mark.parametrize("command", [["jobs"], ["submit", "requests.jsonl"]])
def test_another_machines_redis_without_a_password_is_exit_2(requests: Path, command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--redis-url", "redis://redis.example/0"])

    assert result.exit_code == 2
    assert result.stderr.startswith(
        "millrace: redis.url=redis://redis.example/0: on another machine and without a pass"
    )
    assert requests.exists()
