"""A checkpoint is checked without its weights: what loading refuses is refused alike, and nothing is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.files import Checkpoint
from engine.checkpoint.model_config import EncoderConfig, read_config
from engine.errors import CheckpointError
from engine.models.load import check_decoder, check_encoder, load_decoder, load_encoder
from engine.models.placement import ModelPlacement
from kernels.dispatch import operations
from tests.support.decoder_config import decoder_config
from tests.support.tiny_checkpoint import Family, make_checkpoint
from tests.support.tiny_embedders import make_bert_checkpoint, make_body_checkpoint

CPU = torch.device("cpu")
PLACEMENT = ModelPlacement(CPU, torch.float32, operations(CPU), max_positions=64, bucketed_min_tokens=8)


def check(path: Path) -> None:
    config = read_config(path)
    with Checkpoint.open(path) as checkpoint:
        if isinstance(config, EncoderConfig):
            check_encoder(config, checkpoint)
        else:
            check_decoder(config, checkpoint)


def load(path: Path) -> None:
    config = read_config(path)
    with Checkpoint.open(path) as checkpoint:
        if isinstance(config, EncoderConfig):
            load_encoder(config, checkpoint, PLACEMENT)
        else:
            load_decoder(config, checkpoint, PLACEMENT)


def refusal_of(act: Callable[[Path], None], path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        act(path)
    return str(caught.value)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_a_whole_checkpoint_passes(tmp_path: Path, family: Family) -> None:
    check(make_checkpoint(tmp_path, family))


def test_so_do_a_tied_one_a_body_alone_and_an_encoder(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True))
    check(make_body_checkpoint(tmp_path / "body"))
    check(make_bert_checkpoint(tmp_path / "bert", masked_lm=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "bert"])
def test_every_tensor_that_is_missing_or_misshapen_is_refused_as_loading_refuses_it(
    tmp_path: Path, family: Family | str
) -> None:
    path = (
        make_bert_checkpoint(tmp_path, num_hidden_layers=1)
        if family == "bert"
        else make_checkpoint(tmp_path, "qwen3_moe", num_experts=2, num_hidden_layers=1)
    )
    file = path / "model.safetensors"
    weights = load_file(file)
    for name in sorted(weights):
        if "pooler" in name:  # of no use here, so of no matter
            continue
        others = {other: tensor for other, tensor in weights.items() if other != name}
        for spoilt in (others, {**others, name: torch.zeros(3)}):
            save_file(spoilt, file, metadata={"format": "pt"})
            said = refusal_of(check, path)
            assert name in said
            assert said == refusal_of(load, path)


def test_an_extra_tensor_and_a_dtype_are_refused_as_loading_refuses_them(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    for spoilt in (
        {**weights, "model.more": torch.zeros(1)},
        {**weights, "lm_head.weight": weights["lm_head.weight"].double()},
    ):
        save_file(spoilt, path / "model.safetensors", metadata={"format": "pt"})
        assert refusal_of(check, path) == refusal_of(load, path)


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", tie_word_embeddings=True)

    def never(*_: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "read", never)
    with Checkpoint.open(path) as checkpoint:
        check_decoder(decoder_config(path), checkpoint)
