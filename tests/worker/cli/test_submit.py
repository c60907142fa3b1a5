"""`millrace submit`: one file, several, patterns, standard input, gzip or not, where no worker runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from tests.support.registry import TestRegistry
from tests.support.request_lines import completion_line
from tests.support.workers import millrace
from worker.cli.main import cli


def submit(redis_url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["submit", *arguments, "--redis-url", redis_url])


def staged_ids(registry: TestRegistry, printed: str) -> list[str]:
    """The custom ids of a job's lines, in their order."""
    job_id = printed.strip()
    total = registry.status(job_id).request_counts.total
    return [json.loads(line or b"")["custom_id"] for line in registry.leases().lines(job_id, range(total))]


def write(path: Path, *custom_ids: str, packed: bool = False) -> Path:
    data = b"\n".join(completion_line(custom_id=custom_id) for custom_id in custom_ids)
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def test_files_and_patterns_are_one_job_in_the_order_they_are_given(
    redis_url: str, registry: TestRegistry, tmp_path: Path
) -> None:
    last = write(tmp_path / "a-last.jsonl", "5", "6")
    write(tmp_path / "day-1.jsonl", "1", "2")
    write(tmp_path / "day-2.jsonl.gz", "3", packed=True)
    write(tmp_path / "day-3.txt", "4", packed=True)

    done = submit(redis_url, str(tmp_path / "day-*"), str(last))

    assert done.exit_code == 0, done.output
    assert staged_ids(registry, done.stdout) == ["1", "2", "3", "4", "5", "6"]


def test_gzip_comes_by_standard_input_too(redis_url: str, registry: TestRegistry, tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", "0")
    packed = write(tmp_path / "in.gz", "1", "2", packed=True)

    done = millrace("submit", first, "-", "--redis-url", redis_url, stdin=packed.read_bytes())

    assert done.returncode == 0, done.stderr
    assert staged_ids(registry, done.stdout.decode()) == ["0", "1", "2"]


def test_broken_gzip_is_exit_2_and_nothing_is_submitted(redis_url: str, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", "1")
    broken = write(tmp_path / "broken.jsonl", *map(str, range(5000)), packed=True)
    broken.write_bytes(broken.read_bytes()[:-20])

    done = submit(redis_url, str(good), str(broken))

    assert done.exit_code == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"millrace: {broken}: its gzip data is broken")
    assert line.endswith("nothing was submitted")
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("*") == []


@pytest.mark.parametrize("arguments", [[], ["none-*.jsonl"], ["-", "-"]])
def test_no_input_is_exit_2(redis_url: str, arguments: list[str]) -> None:
    assert submit(redis_url, *arguments).exit_code == 2


@pytest.mark.parametrize("output", ["in/output.jsonl", "in/", "in"])
def test_no_input_is_overwritten(redis_url: str, tmp_path: Path, output: str) -> None:
    (tmp_path / "in").mkdir()
    names = ("output.jsonl", "errors.jsonl")
    paths = [str(write(tmp_path / "in" / name, "1")) for name in names]

    assert submit(redis_url, *paths, "-o", output).exit_code == 2

    assert all(Path(path).read_bytes() for path in paths)


def test_strict_endpoint_and_model_are_passed_on(redis_url: str, registry: TestRegistry, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", "1")

    done = submit(redis_url, str(path), "--strict", "--endpoint", "/v1/completions", "--model", "tiny")

    fields = registry.redis.hgetall(registry.keys.job(done.stdout.strip()))
    assert (fields[b"strict"], fields[b"url"], fields[b"pin"]) == (b"1", b"/v1/completions", b"tiny")
    assert submit(redis_url, str(path), "--endpoint", "/v1/nonsense").exit_code == 2


def test_the_last_results_stay_where_nothing_was_submitted(redis_url: str, tmp_path: Path) -> None:
    last = tmp_path / "out.jsonl"
    last.write_text("the last run's")
    path = write(tmp_path / "in.jsonl", *map(str, range(5000)), packed=True)
    path.write_bytes(path.read_bytes()[:-20])

    assert submit(redis_url, str(path), "-o", str(last)).exit_code == 2

    assert last.read_text() == "the last run's"


def test_an_output_that_cannot_be_written_is_exit_2_before_submission(
    redis_url: str, registry: TestRegistry, tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", "1")

    done = submit(redis_url, str(path), "-o", str(tmp_path / "none" / "out.jsonl"))

    assert done.exit_code == 2
    assert "none/out.jsonl: No such file" in done.stderr
    assert registry.redis.keys("*") == []


def test_ignored_parameters_never_reach_a_worker(redis_url: str, registry: TestRegistry, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([completion_line(best_of=2), completion_line()]))

    done = submit(redis_url, str(path), "--ignore-param", "best_of", "--ignore-param", "foo")

    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == ["ignored best_of in 1 line, foo in 0 lines"]
    lines = registry.leases().lines(done.stdout.strip(), [0, 1])
    assert [json.loads(line or b"") for line in lines] == [{"prompt": "hello"}] * 2


def test_a_file_that_is_too_large_is_told_with_its_whole_size(redis_url: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *map(str, range(7)))
    limit = ("--set", "limits.max_prompts_per_job=3")

    whole = submit(redis_url, str(path), *limit)
    piped = millrace("submit", "-", "--redis-url", redis_url, *limit, stdin=path.read_bytes())

    mend = "limit 3: raise limits.max_prompts_per_job, here and at the workers, or submit the job in parts\n"
    assert (whole.exit_code, whole.stderr) == (2, f"millrace: the job has 7 prompts, {mend}")
    assert (piped.returncode, piped.stderr.decode()) == (2, f"millrace: the job has 4 prompts or more, {mend}")


def test_a_bad_option_of_a_job_is_one_line_and_exit_2(redis_url: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", "1")

    done = submit(redis_url, str(path), "--tenant", "a b")

    told = 'millrace: tenant is "a b"; accepted: 1 to 64 letters, digits, ., _ and - (ASCII)\n'
    assert (done.exit_code, done.stderr) == (2, told)


def test_minus_i_is_the_same_as_a_file(redis_url: str, registry: TestRegistry, tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", "1"), write(tmp_path / "b.jsonl", "2")

    assert staged_ids(registry, submit(redis_url, "-i", str(second), str(first)).stdout) == ["1", "2"]


def test_as_json_it_is_the_batch_object_and_no_id_beside_it(redis_url: str, tmp_path: Path) -> None:
    done = submit(redis_url, str(write(tmp_path / "in.jsonl", "1", "2")), "--json")

    batch = json.loads(done.stdout)
    assert (batch["object"], batch["status"], batch["request_counts"]["total"]) == ("batch", "validating", 2)


def test_how_many_may_fail_is_only_asked_by_who_waits(redis_url: str, registry: TestRegistry, tmp_path: Path) -> None:
    done = submit(redis_url, str(write(tmp_path / "in.jsonl", "1")), "--max-failed", "5%")

    assert done.exit_code == 2
    assert "accepted: with --wait or -o" in done.stderr
    assert registry.redis.keys("*") == []


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PAR1\x15\x04", "a Parquet file"),
        (gzip.compress(b"id,prompt\n1,hello\n", mtime=0), "a table"),  # the same name in every run
        (b"[{}]", "JSON array"),
    ],
)
def test_what_is_no_file_of_lines_is_exit_2(
    redis_url: str, registry: TestRegistry, tmp_path: Path, content: bytes, kind: str
) -> None:
    (tmp_path / "in").write_bytes(content)
    good = write(tmp_path / "good.jsonl", "1")

    named, piped = (
        submit(redis_url, str(good), f"{tmp_path}/in"),
        millrace("submit", "-", "--redis-url", redis_url, stdin=content),
    )

    assert (named.exit_code, piped.returncode) == (2, 2)
    assert f"{tmp_path}/in: it" in named.stderr
    assert kind in named.stderr
    assert kind in piped.stderr.decode()
    assert registry.redis.keys("*") == []
