"""The sides of the peers benchmark: the trial server and the queue."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks.peers.servers import serve
from tests.benchmarks.peers.sides import TrialServerFailed, queue_side, trial_server
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.processes import wait_until
from tests.support.tiny_checkpoint import make_checkpoint

SERVER = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from {serve.__module__} import serve
def generate(prompts, max_tokens):
    print("noise on standard output")
    if prompts == [[13]]:
        raise SystemExit("thirteen is unlucky")
    return [[prompt[0] + 1] * max_tokens for prompt in prompts]
def load():
    print("more noise")
    return generate, {{"pid": str(os.getpid())}}
serve(load)
"""
COMMAND = [sys.executable, "-c", SERVER]

SETTINGS = ["engine.dtype=float32", "engine.kv_cache.num_blocks=100"]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_trial_is_answered_whatever_libraries_print(tmp_path: Path) -> None:
    with trial_server(COMMAND, {}, tmp_path / "log") as server:
        answer = server.run([[4], [7]], 3)
        assert answer["outputs"] == [[5, 5, 5], [8, 8, 8]]
        assert 0 < answer["seconds"] < 5
    assert "noise on standard output" in (tmp_path / "log").read_text()


def test_it_is_stopped_between_trials_and_gone_at_the_end(tmp_path: Path) -> None:
    with trial_server(COMMAND, {}, tmp_path / "log") as server:
        pid = int(server.about["pid"])
        for _ in range(2):
            wait_until(lambda: _state(pid) == "T")
            server.run([[1]], 1)
    assert not Path(f"/proc/{pid}").exists()


def test_a_side_that_dies_says_why(tmp_path: Path) -> None:
    with (
        trial_server(COMMAND, {}, tmp_path / "log") as server,
        pytest.raises(TrialServerFailed, match="thirteen is unlucky"),
    ):
        server.run([[13]], 1)


def test_answers_of_another_length_are_no_measurement(tmp_path: Path) -> None:
    short = [sys.executable, "-c", SERVER.replace("* max_tokens", "* 2")]
    with trial_server(short, {}, tmp_path / "log") as server, pytest.raises(AssertionError, match="not 5"):
        server.run([[1]], 5)


@pytest.mark.slow
def test_our_server_runs_the_engine_with_the_settings_given(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    module = "tests.benchmarks.peers.servers"
    settings = ["engine.dtype=float32", "engine.num_threads=1", "engine.kv_cache.num_blocks=100"]
    with trial_server(
        [sys.executable, "-m", module, "millrace", str(model), *settings], {}, tmp_path / "log"
    ) as server:
        answer = server.run([[1, 2, 3], [4, 5, 6, 7]], 5)
        assert [len(output) for output in answer["outputs"]] == [5, 5]
        assert server.run([[4, 5, 6, 7], [1, 2, 3]], 5)["outputs"] == answer["outputs"][::-1]
        assert server.about["dtype"] == "float32"


@pytest.mark.slow
def test_a_trial_through_the_queue_gives_the_engines_tokens_in_order(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    prompts = [[number, 2, 3] for number in range(12)]
    with queue_side(model, SETTINGS) as side:
        answer = side.run(prompts, 4)
    assert 0 < answer["seconds"] < side.command_s[0]
    requests = [greedy_request(str(number), prompt, 4) for number, prompt in enumerate(prompts)]
    outputs = run_all(load_engine(model), requests)
    assert answer["outputs"] == [tokens_of(outputs[str(number)]) for number in range(12)]
