"""`millrace run` over a file with bad lines in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.records import check_thousand_records, read_records
from tests.support.thousand_lines import thousand_lines

MILLRACE = Path(sys.executable).parent / "millrace"  # the installed command


def test_a_thousand_lines_with_twenty_bad_ones_give_a_thousand_records(tmp_path: Path, tiny_model: Path) -> None:
    requests, results, summary = tmp_path / "requests.jsonl", tmp_path / "results.jsonl", tmp_path / "summary.json"
    requests.write_text("\n".join(thousand_lines()) + "\n")
    command = [str(MILLRACE), "run", "-i", str(requests), "-o", str(results)]
    done = subprocess.run(
        [*command, "--model", str(tiny_model), "--summary", str(summary)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    check_thousand_records(read_records(results))
    figures = json.loads(summary.read_text())
    assert (figures["requests"], figures["failed"]) == (1000, 20)
    assert figures["output_tokens"] > 0
    assert 0 < figures["cached_tokens"] < figures["prompt_tokens"]
    assert figures["elapsed_s"] > 0
    assert figures["load_s"] > 0
