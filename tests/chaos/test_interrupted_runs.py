"""`millrace run` that is interrupted again and again and resumed: no record is lost, none is there twice."""

from __future__ import annotations

import json
import random
import re
import signal
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import wait_until, warm_interpreter
from tests.support.workers import CLI, ONE_THREAD

TIMEOUT_S = 600.0  # an undisturbed run of 500 lines took more than 200 s at a load of 20
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
# Few at once, so that records come one after the other; without hits, whose number depends on what ran before.
ENGINE = (
    *("--set", "engine.deterministic=true", "--set", "engine.max_num_seqs=4"),
    *("--set", "engine.prefix_cache.enabled=false", *ONE_THREAD),
)
LONGEST_WAIT = 6  # records that a run writes before it is interrupted, in a plain file


def request_lines(count: int) -> bytes:
    """Greedy and seeded prompts, some with a custom_id, every tenth a bad line or one whose custom_id is taken."""
    rng, lines = random.Random(19), []
    for number in range(count):
        line = {"prompt": f"{rng.random()}: {number}", "max_tokens": rng.randint(20, 60), "ignore_eos": True}
        line |= {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
        if number % 3 == 0:
            line["custom_id"] = f"mine-{number}"
        if number % 10 == 9:
            line |= {"custom_id": "mine-0"} if number % 20 == 9 else {"n": 0}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


def whole_lines(path: Path) -> bytes:
    """The lines of a file as far as they can be read, also where its writer was killed."""
    data = path.read_bytes() if path.exists() else b""
    if path.suffix == ".gz":
        packed, data = data, b""
        while packed:
            unpacker = zlib.decompressobj(wbits=31)
            data += unpacker.decompress(packed)
            packed = unpacker.unused_data
    return data[: data.rfind(b"\n") + 1]


def records(data: bytes) -> list[bytes]:
    """The records, in one order, less the second in which the run began."""
    return sorted(re.sub(rb'"created":[0-9]+', b'"created":0', data).splitlines())


@dataclass
class Runs:
    """Runs of one input into one output; each must keep, as they are, all lines of the runs before it."""

    model: Path
    requests: Path
    output: Path

    @property
    def files(self) -> Sequence[Path]:
        return [self.output] if self.output.suffix else [self.output / f"{name}.jsonl" for name in ("output", "errors")]

    def contents(self) -> list[bytes]:
        return [whole_lines(file) for file in self.files]

    def run(self, end: Callable[[list[bytes], list[bytes]], bool] | None, how: signal.Signals) -> int:
        """Resume until `end` of the contents before and now, and then send the signal; the exit code."""
        before = self.contents()
        with self.requests.with_name("log").open("ab") as log:
            arguments = ["run", "-i", str(self.requests), "-o", str(self.output), "--model", str(self.model)]
            process = warm_interpreter().start(CLI, [*arguments, *ENGINE, "--resume"], log)
        if end is not None:
            wait_until(lambda: end(before, self.contents()) or process.poll() is not None, timeout_s=TIMEOUT_S)
            process.send_signal(how)
        code = process.wait(TIMEOUT_S)
        for kept, now in zip(before, self.contents(), strict=True):
            assert now.startswith(kept), "a record of an earlier run is not there any more"
        return code


@pytest.mark.parametrize(
    ("name", "num_lines", "num_interruptions"),
    [
        ("out.jsonl", 60, 3),
        pytest.param("out.jsonl", 400, 20, marks=pytest.mark.chaos),
        pytest.param("out", 400, 20, marks=pytest.mark.chaos),
        pytest.param("out.jsonl.gz", 500, 3, marks=pytest.mark.chaos),
    ],
)
def test_an_interrupted_run_ends_with_the_records_of_an_undisturbed_one(
    tiny_model: Path, tmp_path: Path, name: str, num_lines: int, num_interruptions: int
) -> None:
    requests, rng = tmp_path / "in.jsonl", random.Random(num_interruptions)
    requests.write_bytes(request_lines(num_lines))
    undisturbed = Runs(tiny_model, requests, tmp_path / "undisturbed.jsonl")
    assert undisturbed.run(None, signal.SIGTERM) == 0
    if name == "out":
        (tmp_path / name).mkdir()
    runs = Runs(tiny_model, requests, tmp_path / name)

    codes = []
    for number in range(num_interruptions):
        # Compressed records come to the disk once a second; a wait for none ends the run while it still loads.
        num_more = 1 if name.endswith(".gz") else rng.randint(0, LONGEST_WAIT)

        def has_more(before: list[bytes], now: list[bytes], num_more: int = num_more) -> bool:
            return sum(data.count(b"\n") for data in now) >= sum(data.count(b"\n") for data in before) + num_more

        codes.append(runs.run(has_more, SIGNALS[number % len(SIGNALS)]))

    assert 0 not in codes, "each run was interrupted before its end"
    assert runs.run(None, signal.SIGTERM) == 0
    assert records(b"".join(runs.contents())) == records(b"".join(undisturbed.contents()))
    assert len(records(b"".join(runs.contents()))) == num_lines
