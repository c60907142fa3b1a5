"""GPTQ's update against its definition in float64, and that calibrated files are nearer than rounded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.weights import Checkpoint
from engine.errors import CheckpointError
from engine.loading.calibration import DAMPING, calibrated, read_prompts, round_with_inputs
from engine.loading.quantize import quantise_checkpoint
from engine.text.tokenizer import Tokenizer
from kernels.quantised import QuantisedWeight, WeightScheme, quantise
from kernels.reference.layers import dequantised
from tests.support.tensors import randn
from tests.support.tiny_checkpoint import decoder_config, make_bert_checkpoint, make_checkpoint
from tests.support.tiny_families import Family

SCHEME = WeightScheme(4, is_float=False, group_size=16)


def correlated_inputs(width: int, rank: int, rows: int) -> torch.Tensor:
    """Rows [rows, width] that a few directions explain but for a tenth, of sizes that differ."""
    mixed = randn(rows, rank, seed=1) @ randn(rank, width, seed=2) + 0.3 * randn(rows, width, seed=3)
    return mixed * torch.linspace(0.2, 3, width)[torch.randperm(width, generator=torch.Generator().manual_seed(4))]


def by_definition(weight: torch.Tensor, squares: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Input by input in float64: round it, then solve for what the others must be, among those that are left."""
    scales = quantise(weight, scheme).scales.double()
    hessian = squares.double()
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))
    rest, result = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    left = squares.diagonal().argsort(descending=True, stable=True).tolist()
    assert scheme.group_size is not None
    while left:
        column, *others = left
        scale = scales[:, column // scheme.group_size]
        result[:, column] = (rest[:, column] / scale).round().clamp(-7, 7) * scale
        loss = rest[:, column] - result[:, column]
        if others:
            # The least of (d H d) where d at `column` is -loss: H_oo d_o = H_oc loss.
            moved = torch.linalg.solve(hessian[others][:, others], hessian[others, column])
            rest[:, others] += loss[:, None] * moved
        left = others
    return result


def output_error(weight: torch.Tensor, rounded: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (weight - rounded).T).square().mean())


def test_the_update_is_its_definition_in_float64() -> None:
    weight, x = randn(24, 160), correlated_inputs(160, 20, 400)  # more columns than one lazy block
    squares = x.T @ x
    rounded = round_with_inputs(weight, squares, SCHEME, torch.float32)
    expected = by_definition(weight, squares, SCHEME).float()
    assert rounded.scheme == SCHEME
    steps = (dequantised(rounded) - expected) / rounded.scales.repeat_interleave(16, 1)
    # A value between two integers may go to either, and with it what follows in its row.
    assert float((steps.abs() > 0.01).float().mean()) < 0.01


def test_correlated_inputs_lose_less_than_by_rounding_to_the_nearest() -> None:
    weight, x = randn(64, 128), correlated_inputs(128, 12, 512)
    nearest = output_error(weight, dequantised(quantise(weight, SCHEME)), x)
    updated = output_error(weight, dequantised(round_with_inputs(weight, x.T @ x, SCHEME, torch.float32)), x)
    assert updated < 0.5 * nearest


@pytest.mark.parametrize("squares", [torch.zeros(64, 64), torch.eye(64) * 5])
def test_inputs_that_tell_nothing_are_rounded_to_the_nearest(squares: torch.Tensor) -> None:
    weight = randn(8, 64)
    rounded = round_with_inputs(weight, squares, SCHEME, torch.float32)
    assert torch.equal(rounded.values, quantise(weight, SCHEME).values)


def prompts_file(path: Path, count: int = 24) -> Path:
    letters = torch.randint(97, 123, (count, 40), generator=torch.Generator().manual_seed(5))
    path.write_text("\n\n".join("".join(map(chr, row)) for row in letters.tolist()) + "\n")
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "qwen3_moe", "mixtral", "phi3", "granite"])
def test_each_weight_of_a_layer_loses_less_on_its_own_inputs(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.calibration.PASS_TOKENS", 200)  # several passes
    plain = make_checkpoint(tmp_path / "plain", family)
    config, tokenizer = decoder_config(plain), Tokenizer.from_directory(plain)
    prompts = read_prompts(prompts_file(tmp_path / "prompts.txt"), tokenizer, 1024)
    seen: dict[str, torch.Tensor] = {}

    def noting(
        weight: torch.Tensor, squares: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype
    ) -> QuantisedWeight:
        rounded = round_with_inputs(weight, squares, scheme, dtype)
        errors = [weight - dequantised(each) for each in (rounded, quantise(weight, scheme, dtype))]
        updated, nearest = (float(((error @ squares) * error).sum()) for error in errors)
        seen[str(len(seen))] = torch.tensor([updated, nearest])
        return rounded

    monkeypatch.setattr("engine.loading.calibration.round_with_inputs", noting)
    with Checkpoint.open(plain) as checkpoint:
        named = dict(calibrated(config, checkpoint, prompts, SCHEME))
        assert named.keys() == {
            name for name in checkpoint.names() if name.endswith("_proj.weight") or ".experts." in name
        }
        for name, weight in named.items():
            assert weight.shape == checkpoint.shape(name)
    losses = torch.stack(list(seen.values()))
    assert (losses[:, 0] <= losses[:, 1]).float().mean() > 0.95
    assert float(losses[:, 0].sum()) < 0.8 * float(losses[:, 1].sum())


def test_what_cannot_calibrate_is_refused_by_name(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    for file, message in (
        (empty, "empty.txt: holds no prompt; accepted: text, a prompt a line"),
        (tmp_path / "no", "no"),
    ):
        with pytest.raises(CheckpointError, match=message):
            quantise_checkpoint(plain, tmp_path / "out", "w4a16", 16, file)
        assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="an encoder"):
        quantise_checkpoint(make_bert_checkpoint(tmp_path / "bert"), tmp_path / "out", "w4a16", 16, empty)
