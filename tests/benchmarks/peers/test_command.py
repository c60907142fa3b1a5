from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.peers.__main__ import main
from tests.benchmarks.peers.workload import VOCAB_SIZE
from tests.support.tiny_checkpoint import make_checkpoint

SMALL = ["--workload", "dense-shared", "--requests", "4", "--max-tokens", "2", "--dtype", "float32"]
POOL = ["--set", "engine.kv_cache.num_blocks=200"]


@pytest.mark.slow
def test_a_run_through_the_queue_prints_its_tables_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "dense", vocab_size=VOCAB_SIZE)
    (tmp_path / "dense" / "complete").touch()
    report = tmp_path / "figures.json"
    assert main(["--through-queue", *SMALL, *POOL, "--cache", str(tmp_path), "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "ours: Millrace, through Redis and one worker" in printed
    assert "dense-shared: `submit --wait`, start-up and polling included" in printed
    figures = json.loads(report.read_text())
    (comparison,) = figures["comparisons"]
    assert comparison["same_first_token"] == 1.0
    assert len(comparison["ratios"]) == len(figures["command_s"]["dense-shared"]) == 3
    assert figures["distances"]["dense-shared"]["floor_s"] > 0
