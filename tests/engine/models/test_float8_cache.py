"""Models over a KV cache in float8: where its scales come from, and what it does to logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.weights import Checkpoint
from engine.errors import CheckpointError
from engine.execution.batch import ForwardItem, plan_batch
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from engine.models.decoder import DecoderModel
from engine.models.load import load_decoder
from engine.models.placement import ModelPlacement
from engine.resume import model_fingerprint
from engine.staging import ArrayStaging
from kernels import reference
from tests.support.quantised_checkpoint import METHODS, quantise_checkpoint
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint

CPU = torch.device("cpu")
Scales = dict[str, float | list[float]]


def with_kv_scales(directory: Path, scales: Scales, *, scheme: str | None = "static") -> Path:
    """A quantised checkpoint with 2 KV heads each of whose layers has these scales, which a scheme announces."""
    plain = make_checkpoint(directory / "plain", "llama")
    path, _ = quantise_checkpoint(plain, directory, METHODS["fp8_static"])
    weights = load_file(path / "model.safetensors")
    for name, scale in scales.items():
        weights |= {f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale) for layer in (0, 1)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(path: Path, *, has_float8_cache: bool = True) -> DecoderModel:
    placement = ModelPlacement(CPU, torch.float32, reference, 64, None, has_float8_cache=has_float8_cache)
    with Checkpoint.open(path) as checkpoint:
        return load_decoder(decoder_config(path), checkpoint, placement)


def scales_of(model: DecoderModel) -> list[list[list[float]] | None]:
    scales = [layer.attention.kv_scales for layer in model.layers]
    return [None if layer is None else layer.tolist() for layer in scales]


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k_scale": 0.5, "v_scale": 0.25}, [[0.5, 0.5], [0.25, 0.25]]),
        ({"k_scale": [0.5, 2.0], "v_scale": [4.0, 0.25]}, [[0.5, 2.0], [4.0, 0.25]]),
        ({"kv_scale": 0.125}, [[0.125, 0.125], [0.125, 0.125]]),
        ({"k_proj.output_scale": [0.5], "v_proj.output_scale": [0.75]}, [[0.5, 0.5], [0.75, 0.75]]),
        ({"k_scale": 0.5, "k_proj.output_scale": 0.25, "kv_scale": 4.0}, [[0.5, 0.5], [4.0, 4.0]]),  # newest first
        ({"v_scale": [0.5]}, [[1.0, 1.0], [0.5, 0.5]]),
        ({}, [[1.0, 1.0], [1.0, 1.0]]),
    ],
)
def test_scales_are_those_of_the_file_or_1(scales: Scales, expected: list[list[float]], tmp_path: Path) -> None:
    path = with_kv_scales(tmp_path, scales)
    assert scales_of(load(path)) == [expected, expected]
    assert scales_of(load(path, has_float8_cache=False)) == [None, None]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(scale: float, tmp_path: Path) -> None:
    path = with_kv_scales(tmp_path, {"v_scale": scale})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_scale holds .*; accepted: finite numbers"):
        load(path)


def test_scales_that_nothing_announces_are_refused(tmp_path: Path) -> None:
    path = with_kv_scales(tmp_path, {"k_scale": 0.5}, scheme=None)
    with pytest.raises(CheckpointError, match=r"k_scale"):
        load(path)


def test_a_scale_for_another_number_of_heads_is_refused(tmp_path: Path) -> None:
    path = with_kv_scales(tmp_path, {"k_scale": [1.0, 1.0, 1.0]})
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale has shape \[3\]"):
        load(path)


def logits_of(model: DecoderModel, dtype: torch.dtype) -> torch.Tensor:
    """Of the last of 20 tokens, which sees the others through the cache."""
    spec = KVCacheSpec(model.config.num_layers, 16, model.config.num_kv_heads, model.config.head_dim, dtype)
    planned = plan_batch([ForwardItem([*range(5, 25)], 0, range(1, 3), wants_logits=True)], 16)
    batch = planned.on_device(ArrayStaging(CPU).send(planned.arrays))
    return model.forward(batch, KVCacheTensors.allocate(spec, 3, CPU)).logits.float()


def test_a_cache_in_float8_changes_logits_a_little(tmp_path: Path) -> None:
    """By what 3 bits of keys and values are worth, and no more; scales of 1 for a file that announces none."""
    path = make_checkpoint(tmp_path, "qwen3")
    exact, rounded = load(path, has_float8_cache=False), load(path)
    assert scales_of(rounded) == [[[1.0, 1.0], [1.0, 1.0]]] * 2
    expected, found = logits_of(exact, torch.float32), logits_of(rounded, torch.float8_e4m3fn)
    error = (found - expected).abs().max() / expected.std()
    assert 0 < error < 0.3


def test_scales_that_lose_nothing_cancel_out(tmp_path: Path) -> None:
    """Powers of two move every number of e4m3 by its exponent alone: the same logits, to the order of the sums."""
    path = make_checkpoint(tmp_path, "qwen3")
    model = load(path)
    powers = torch.tensor([[0.25, 0.125], [0.125, 0.0625]])
    layers = tuple(replace(layer, attention=replace(layer.attention, kv_scales=powers)) for layer in model.layers)
    expected, found = (logits_of(m, torch.float8_e4m3fn) for m in (model, replace(model, layers=layers)))
    assert (found - expected).abs().max() / expected.std() < 0.1


def test_a_resume_state_does_not_go_from_one_kind_of_cache_to_another(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    assert model_fingerprint(load(path)) != model_fingerprint(load(path, has_float8_cache=False))
