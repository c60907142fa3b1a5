"""`millrace flower`: what it refuses. What it shows: tests/worker/monitor/test_in_browser.py."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from tests.support.millrace import ROOT
from worker.cli.main import cli


def flower(*options: str | Path) -> Result:
    return CliRunner().invoke(cli, ["flower", *map(str, options)], standalone_mode=False)


def test_it_is_not_served_without_a_password() -> None:
    assert "Missing parameter: password_file" in str(flower().exception)


def test_a_password_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("short\n")

    assert "16 characters" in str(flower("--password-file", tmp_path / "password").exception)


def test_a_redis_that_may_not_be_used_is_refused_and_the_password_that_was_made_is_its_owners_alone(
    tmp_path: Path,
) -> None:
    refused = flower("--password-file", tmp_path / "password", "--redis-url", "redis://elsewhere/0")

    assert "redis.url=redis://elsewhere/0: on another machine and without a password" in str(refused.exception)
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600


def test_it_needs_no_torch() -> None:
    code = "import sys, worker.monitor.flower; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
