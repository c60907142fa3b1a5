"""Makes engines of the published models' shapes with random weights.

No file holds the weights: each tensor is drawn on the device when it is read.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import Checkpoint, Shard
from engine.engine import Engine
from engine.loading.derived_settings import derive_for
from engine.loading.load import load_decoder_parts
from engine.models.placement import DTYPES
from settings import load_settings
from tests.benchmarks.peers.workload import write_tokenizer

_PUBLISHED: Mapping[str, object] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
}
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_TINY: Mapping[str, object] = {
    **dict(zip(_SHAPE, (32, 48, 2, 2, 1), strict=True)),
    "vocab_size": 320,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}

STANDARD_DEVIATION = 0.02  # what published models are initialised with

Shape = tuple[int, ...]


@dataclass(frozen=True)
class GpuModel:
    """A published model's configuration."""

    name: str
    config: Mapping[str, object]  # of config.json, in Hugging Face's names
    tokenizer_size: int  # tokens; the embedding's further rows mean nothing
    num_trials: int = 1  # timed runs of the nano-vllm workload

    @property
    def parsed(self) -> ModelConfig:
        """The configuration as the engine reads it."""
        return ModelConfig.from_hf(self.config)

    def tiny(self) -> GpuModel:
        """A tiny model of the same kind, to try the script with; its figures mean nothing."""
        config = {**self.config, **_TINY}
        if "num_experts" in config:
            config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return GpuModel(self.name, config, 300)


def _published(name: str, shape: tuple[int, ...], num_trials: int = 1, **more: object) -> GpuModel:
    """A Qwen3 model of this shape, dense unless `more` says otherwise."""
    config = {**_PUBLISHED, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    return GpuModel(name, config | dict(zip(_SHAPE, shape, strict=True)) | more, 151_669, num_trials)


MODELS: Mapping[str, GpuModel] = {
    model.name: model
    for model in (
        _published("Qwen3-0.6B", (1024, 3072, 28, 16, 8), num_trials=3, tie_word_embeddings=True),
        _published("Qwen3-8B", (4096, 12_288, 36, 32, 8), tie_word_embeddings=False),
        _published(
            "Qwen3-30B-A3B",
            (2048, 6144, 48, 32, 4),
            model_type="qwen3_moe",
            architectures=["Qwen3MoeForCausalLM"],
            tie_word_embeddings=False,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
    )
}


def load_random(model: GpuModel, path: Path, device: torch.device, overrides: Mapping[str, object]) -> Engine:
    """Load an engine whose weights are drawn on the device; the rest of the checkpoint is in `path`.

    Settings are the defaults but for the overrides, whatever this machine's environment says.
    """
    values = {"model.path": str(path), "engine.device": device.type, "engine.dtype": model.parsed.dtype, **overrides}
    effective = load_settings(values, environ={}, dotenv_path=Path(os.devnull))
    config = model.parsed

    def open_checkpoint(_: Path) -> Checkpoint:
        return random_checkpoint(config, device)

    derived = derive_for(effective, path, config, open_checkpoint)
    return Engine(load_decoder_parts(derived, path, config, open_checkpoint=open_checkpoint))


def write_model_directory(model: GpuModel, path: Path) -> None:
    """A checkpoint without weights: config.json, and a tokenizer that knows as many tokens as the published one."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(model.config, indent=1))
    write_tokenizer(path, model.tokenizer_size)


class RandomShard(Shard):
    """Stands for a file of weights, without one: a tensor is a function of its name, drawn on the device.

    The loader copies expert by expert and layer by layer, so there is never a second copy of all weights.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.path = Path("random weights")
        self._dtype = DTYPES[config.dtype]
        self._device = device
        self._shapes = weight_shapes(config)
        self.data_bytes = sum(math.prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str, accepted: Collection[str]) -> torch.dtype:
        return self._dtype

    def read(self, name: str, accepted: Collection[str]) -> torch.Tensor:
        """Draw the tensor: matrices around 0; vectors, which are weights of norms, around 1."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        shape = self._shapes[name]
        mean = 1.0 if len(shape) == 1 else 0.0
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(mean, STANDARD_DEVIATION, generator=generator)

    def release(self) -> None:
        """Do nothing: no file is mapped."""

    def close(self) -> None:
        """Do nothing: no file is open."""


def random_checkpoint(config: ModelConfig, device: torch.device) -> Checkpoint:
    """A checkpoint of random weights, as the loader takes it."""
    shard = RandomShard(config, device)
    return Checkpoint(dict.fromkeys(sorted(shard.names()), shard))


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of each tensor by its Hugging Face name."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update((f"model.layers.{layer}.{name}.weight", shape) for name, shape in _layer(config, layer))
    return shapes


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, q_rows, kv_rows = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    yield from (("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,)))
    yield from (("self_attn.q_proj", (q_rows, hidden)), ("self_attn.o_proj", (hidden, q_rows)))
    yield from (("self_attn.k_proj", (kv_rows, hidden)), ("self_attn.v_proj", (kv_rows, hidden)))
    if config.qk_norm:
        yield from (("self_attn.q_norm", (config.head_dim,)), ("self_attn.k_norm", (config.head_dim,)))
    if config.moe is None or not config.is_moe_layer(layer):
        yield from _swiglu("mlp", hidden, config.intermediate_size)
        return
    yield "mlp.gate", (config.moe.num_experts, hidden)
    for expert in range(config.moe.num_experts):
        yield from _swiglu(f"mlp.experts.{expert}", hidden, config.moe.intermediate_size)


def _swiglu(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield from ((f"{prefix}.{part}_proj", (inner, hidden)) for part in ("gate", "up"))
    yield f"{prefix}.down_proj", (hidden, inner)
