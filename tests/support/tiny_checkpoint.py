"""Small random checkpoints of each model family, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.tiny_tokenizer import EOS_TOKEN, PAD_TOKEN, make_tokenizer

Family = Literal["qwen3", "qwen3_moe", "llama"]

# The tokenizer knows fewer ids than the model, as with published Qwen3 checkpoints: the last ids decode to nothing.
VOCAB_SIZE = 320

DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # The usual 0.02 leaves logits so close together that rounding decides between them.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MOE_DEFAULTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
ROPE_DEFAULTS: dict[Family, dict[str, Any]] = {
    "qwen3": {"rope_type": "default", "rope_theta": 1000000.0},
    "qwen3_moe": {"rope_type": "default", "rope_theta": 1000000.0},
    "llama": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def make_checkpoint(
    path: Path,
    family: Family = "qwen3",
    *,
    seed: int = 0,
    max_shard_size: str | int = "5GB",
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint with tokenizer and generation config into `path`; returns `path`.

    `config_overrides` are the Hugging Face config's own names; `max_shard_size="20KB"` splits the weights into
    several files with an index.
    """
    tokenizer = make_tokenizer(path)
    model = make_model(family, seed=seed, **config_overrides)
    ending = [tokenizer.token_to_id(EOS_TOKEN), tokenizer.token_to_id(PAD_TOKEN)]
    model.generation_config = GenerationConfig(eos_token_id=ending, pad_token_id=ending[1])
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def make_model(family: Family = "qwen3", *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """The same model in memory, in evaluation mode. Leaves the global random state as it was."""
    options: dict[str, Any] = DEFAULTS | {"rope_parameters": dict(ROPE_DEFAULTS[family])}
    if family == "qwen3_moe":
        options |= MOE_DEFAULTS
    options |= config_overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(family, options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # born as ones, which would hide a norm weight left out or swapped
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def _build(family: Family, options: dict[str, Any]) -> PreTrainedModel:
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**options))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**options))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    for parameter in model.parameters():  # model.to() would also round the rotary frequencies
        parameter.data = parameter.data.to(getattr(torch, options["dtype"]))
    return model
