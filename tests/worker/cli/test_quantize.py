"""`millrace quantize` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.tiny_checkpoint import make_checkpoint
from worker.cli.exit_codes import ExitCode
from worker.cli.quantize import quantize


def test_it_says_what_it_wrote(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    command = [str(plain), str(tmp_path / "out"), "--scheme", "w4a16", "--group-size", "32"]

    result = CliRunner().invoke(quantize, command)

    assert result.exit_code == ExitCode.DONE, result.output
    assert result.output.startswith(f"{tmp_path / 'out'}: int4, groups of 32; ")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--scheme", "fp8", "--group-size", "32"], ExitCode.USAGE, "--group-size 32: not with --scheme fp8"),
        (["--scheme", "w4a16"], ExitCode.FAILED, "inputs; accepted: a multiple of the group size (128)"),
        (["--scheme", "int3"], ExitCode.USAGE, "'int3' is not one of 'w4a16', 'w8a8', 'fp8'"),
    ],
)
def test_a_mistake_is_told(options: list[str], code: ExitCode, said: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3")

    result = CliRunner().invoke(quantize, [str(plain), str(tmp_path / "out"), *options])

    assert result.exit_code == code
    assert said in result.output
    assert not (tmp_path / "out").exists()
