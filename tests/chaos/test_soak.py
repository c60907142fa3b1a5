"""The soak in small; five minutes of it are in worker/DESIGN.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.millrace import ROOT


@pytest.mark.chaos
@pytest.mark.timeout(240)
def test_a_short_soak_loses_doubles_and_changes_nothing() -> None:
    command = [sys.executable, "-m", "tests.chaos.soak", "--minutes", "0.3", "--workers", "1", "--jobs", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=220)
    print(done.stdout.decode())
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()[-5000:]
