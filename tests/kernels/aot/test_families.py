"""What each family launches at the sizes of a published model compiles for sm_90, and for sm_80 by `make slow`.

Its layers run on PyTorch's meta device, which has shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig

import kernels.triton
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.families import DECODERS
from engine.checkpoint.model_config import ModelConfig, read_config
from engine.checkpoint.weights import Checkpoint
from engine.execution.batch import ForwardItem, plan_batch
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from engine.models.decoder import DecoderModel
from engine.models.load import load_decoder
from engine.models.load_encoder import load_encoder
from engine.models.placement import ModelPlacement
from engine.models.tensor_source import TensorSource
from kernels.interface import Operations
from tests.kernels.aot.table import SM_90
from tests.support.compiled_kernels import check_resources, compiling_for
from tests.support.family_table import COLUMNS, NO_KERNELS, shows
from tests.support.tiny_checkpoint import EncoderName, make_bert_checkpoint, options_of
from tests.support.tiny_families import Family

pytestmark = pytest.mark.timeout(900)

META = torch.device("meta")
BLOCK_SIZE = 16
SIZE_NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
QWEN_MOE = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
GRANITE_MOE = {"num_local_experts": 40, "num_experts_per_tok": 8}
# Of Llama 3.1 8B, Qwen2.5 7B, Qwen1.5-MoE-A2.7B, Qwen3 8B and 30B-A3B, Mistral 7B v0.1, Mixtral 8x7B, Phi-4, SmolLM3,
# Granite 3.3 8B and 3.1 3B-A800M (and with a shared expert), OLMo 2 7B, GLM-4.5-Air, OLMo 3 7B, Gemma 2 9B, Gemma 3 1B,
# gpt-oss-20b.
SIZES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "llama": ((4096, 14336, 32, 8, 128), {}),
    "qwen2": ((3584, 18944, 28, 4, 128), {}),
    "qwen2_moe": (
        (2048, 5632, 16, 16, 128),
        {
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3": ((4096, 12288, 32, 8, 128), {}),
    "qwen3_moe": ((2048, 6144, 32, 4, 128), QWEN_MOE),
    "mistral": ((4096, 14336, 32, 8, 128), {"sliding_window": 4096}),
    "mixtral": ((4096, 14336, 32, 8, 128), {}),
    "phi3": ((5120, 17920, 40, 10, 128), {}),
    "smollm3": ((2048, 11008, 16, 4, 128), {}),
    "granite": ((4096, 12800, 32, 8, 128), {}),
    "granitemoe": ((1536, 512, 24, 8, 64), GRANITE_MOE),
    "granitemoeshared": ((1536, 512, 24, 8, 64), {**GRANITE_MOE, "shared_intermediate_size": 1024}),
    "olmo2": ((4096, 11008, 32, 32, 128), {}),
    "glm4_moe": (
        (4096, 10944, 96, 8, 128),
        {
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "olmo3": ((4096, 11008, 32, 32, 128), {"sliding_window": 4096}),
    "gemma2": (
        (3584, 14336, 16, 8, 256),
        {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": ((1152, 6912, 4, 1, 256), {"sliding_window": 512}),
    "gpt_oss": (
        (2880, 2880, 64, 8, 64),
        {"sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
    ),
}
# (queries, tokens in KV) of each row: one whose keys are split, many that fill a GPU, and chunks beside them.
STEPS: Sequence[Sequence[tuple[int, int]]] = ([(1, 4096)], [(1, 4096)] * 264, [(1, 4096)] * 8 + [(504, 4096)])
ATTENTION = {"_decode_kernel", "_prefill_kernel", "qk_norm_rope_store_kv_kernel", "rms_norm_kernel"}


class ShapesAsked(TensorSource):
    """Gives whatever is asked for, without values."""

    def has(self, name: str) -> bool:
        return False

    def finish(self) -> None:
        return

    def _read(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = ()) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)


def placement_on(device: torch.device) -> ModelPlacement:
    ops = cast(Operations, kernels.triton)
    return ModelPlacement(device, torch.bfloat16, ops, max_positions=4096, bucketed_min_tokens=4)


def model_of(family: str, patch: pytest.MonkeyPatch) -> DecoderModel:
    sizes, more = SIZES[family]
    options = options_of(cast(Family, family), dict(zip(SIZE_NAMES, sizes, strict=True)) | more)
    hf_config = AutoConfig.for_model(family, **options).to_dict()
    config = ModelConfig.from_hf({**hf_config, "architectures": [DECODERS[family].generating_class]})
    patch.setattr("engine.models.load.TensorSource", ShapesAsked)
    return load_decoder(
        config, cast(Checkpoint, SimpleNamespace(names=frozenset, release=lambda: None)), placement_on(META)
    )


def run(model: DecoderModel, rows: Sequence[tuple[int, int]]) -> None:
    config = model.config
    spec = KVCacheSpec(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.bfloat16)
    items = [
        ForwardItem([0] * queries, kv_len - queries, [1] * -(-kv_len // BLOCK_SIZE), wants_logits=True)
        for queries, kv_len in rows
    ]
    planned = plan_batch(items, BLOCK_SIZE)
    batch = planned.on_device([torch.from_numpy(array).to(META) for array in planned.arrays])
    model.forward(batch, KVCacheTensors.allocate(spec, 2, META))


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), SM_90])
@shows("aot")
def test_every_launch_compiles(family: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family, monkeypatch)
    with compiling_for(capability) as compiled:
        for rows in STEPS:
            run(model, rows)
    assert {kernel.name for kernel in compiled} >= ATTENTION
    check_resources(compiled)


@pytest.mark.parametrize("family", [family for family, why in COLUMNS["aot"].without.items() if why == NO_KERNELS])
def test_a_family_without_kernels_launches_none(family: str, tmp_path: Path) -> None:
    config = read_config(make_bert_checkpoint(tmp_path, head="classes", family=cast(EncoderName, family)))
    assert isinstance(config, EncoderConfig)
    with Checkpoint.open(tmp_path) as checkpoint:
        model = load_encoder(config, checkpoint, placement_on(torch.device("cpu")))
    with compiling_for(90) as compiled, torch.inference_mode():
        model.forward(model.pack([[5, 6, 7], [8]]))
    assert compiled == []
