"""Loading a model's weights: what is refused, by the name of the tensor, and what memory it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.model_config import read_config
from engine.checkpoint.weights import Checkpoint
from engine.errors import CapabilityError, CheckpointError
from engine.models.decoder import weights_bytes
from engine.models.load import check_decoder, load_decoder
from engine.models.load_encoder import check_encoder, load_encoder
from engine.models.placement import ModelPlacement
from kernels.dispatch import operations
from tests.support.engines import load_engine
from tests.support.tensors import native_variants, needs_native
from tests.support.tiny_checkpoint import (
    VOCAB_SIZE,
    decoder_config,
    load_alone,
    make_bert_checkpoint,
    make_body_checkpoint,
    make_checkpoint,
)
from tests.support.tiny_families import FAMILY_DEFAULTS, Family

CPU = torch.device("cpu")
FEW_EXPERTS = {
    "qwen2_moe": {"num_experts": 2},
    "qwen3_moe": {"num_experts": 2},
    "mixtral": {"num_local_experts": 2},
}
PLACEMENT = ModelPlacement(CPU, torch.float32, operations(CPU), max_positions=64, bucketed_min_tokens=8)


def _edit(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors, None to drop one; `__` stands for the dots."""
    weights = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILY_DEFAULTS)
def test_every_family_loads_whole(tmp_path: Path, family: Family) -> None:
    model = load_alone(make_checkpoint(tmp_path, family))
    assert len(model.layers) == 2
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert weights_bytes(model) == stored


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    _edit(tmp_path, model__layers__1__self_attn__k_norm__weight=None)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.self_attn\.k_norm\.weight is missing"):
        load_alone(tmp_path)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    _edit(tmp_path, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(CheckpointError, match=r"no place for tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_alone(tmp_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    _edit(tmp_path, model__layers__0__mlp__experts__3__down_proj__weight=torch.zeros(64, 31))
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight has shape \[64, 31\].*\[64, 32\]"):
        load_alone(tmp_path)


def test_a_layer_that_config_does_not_know_is_an_extra(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    _edit(tmp_path, model__layers__2__mlp__up_proj__weight=torch.zeros(96, 64))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_alone(tmp_path)


def test_a_tied_head_may_be_stored_twice_but_only_if_it_is_the_embedding(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _edit(tmp_path, lm_head__weight=embedding.clone())
    model = load_alone(tmp_path)
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert weights_bytes(model) == stored  # rows to look up, and the head's own layout
    _edit(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        load_alone(tmp_path)


def test_loading_makes_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    """Anonymous memory grows by what must be fused, at most the weights; the file's pages leave the process again."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 8192}
    make_checkpoint(tmp_path, "qwen3", **shape)
    weights_kb = (tmp_path / "model.safetensors").stat().st_size // 1024
    code = f"""
import re, sys
from pathlib import Path
from tests.support.processes import resident_file_bytes
from tests.support.tiny_checkpoint import load_alone
anonymous_kb = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = anonymous_kb()
model = load_alone(Path({str(tmp_path)!r}))
print(anonymous_kb() - before, resident_file_bytes(Path({str(tmp_path)!r})) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown_kb, mapped_kb = (int(word) for word in done.stdout.split())
    assert grown_kb < 1.1 * weights_kb
    assert mapped_kb < 0.1 * weights_kb


@needs_native
@pytest.mark.parametrize("variant", native_variants())
def test_rows_of_a_tied_head_are_those_of_the_embedding(tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True, vocab_size=330, dtype="bfloat16")
    overrides = {"engine.dtype": "bfloat16", "engine.native_kernels": variant}
    model = load_engine(tmp_path, overrides).model
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.embed_tokens.rows(torch.arange(330)), embedding)
    assert (model.embed_tokens is model.lm_head) == (variant == "avx512_bf16")


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


@pytest.mark.parametrize("family", FAMILY_DEFAULTS)
def test_a_whole_checkpoint_passes(tmp_path: Path, family: Family) -> None:
    check(make_checkpoint(tmp_path, family))


def test_so_do_a_tied_one_a_body_alone_and_an_encoder(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True))
    check(make_body_checkpoint(tmp_path / "body"))
    check(make_bert_checkpoint(tmp_path / "bert", head="tokens"))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "granitemoeshared", "mixtral", "qwen2", "phi3", "bert"])
def test_each_missing_or_misshapen_tensor_is_refused_as_loading_does(tmp_path: Path, family: Family | str) -> None:
    path = (
        make_bert_checkpoint(tmp_path, num_hidden_layers=1)
        if family == "bert"
        else make_checkpoint(tmp_path, cast(Family, family), num_hidden_layers=1, **FEW_EXPERTS.get(family, {}))
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


def test_logits_are_float32_whatever_the_models_dtype(tmp_path: Path) -> None:
    model = load_engine(make_checkpoint(tmp_path, "qwen3"), {"engine.dtype": "bfloat16"}).model
    logits = model.logits(torch.ones(3, model.config.hidden_size, dtype=torch.bfloat16))
    assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (3, VOCAB_SIZE))
    with pytest.raises(CapabilityError, match="no lm_head"):
        replace(model, lm_head=None).logits(torch.ones(1, model.config.hidden_size, dtype=torch.bfloat16))
