"""`millrace quantize` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

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


def test_prompts_change_how_it_rounds(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    (tmp_path / "prompts.txt").write_text("first come, first served\n\nabcdefg hijkl\n")
    options = ["--scheme", "w4a16", "--group-size", "32"]

    for name, more in (("nearest", []), ("updated", ["--calibrate", str(tmp_path / "prompts.txt")])):
        result = CliRunner().invoke(quantize, [str(plain), str(tmp_path / name), *options, *more])
        assert result.exit_code == ExitCode.DONE, result.output

    nearest, updated = (load_file(tmp_path / name / "model.safetensors") for name in ("nearest", "updated"))
    assert nearest.keys() == updated.keys()
    changed = {name.rpartition(".")[2] for name in nearest if not torch.equal(nearest[name], updated[name])}
    assert changed == {"weight_packed"}


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--scheme", "w8a8", "--calibrate", "p"], ExitCode.USAGE, "--calibrate p: not with --scheme w8a8; accepted"),
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
