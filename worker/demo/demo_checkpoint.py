"""A small Qwen3-MoE checkpoint with random weights: real in every respect but its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from worker.demo.demo_requests import demo_corpus

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, EXPERT_INNER = 128, 4, 4, 2, 32, 8, 96
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": EXPERT_INNER,
    "max_position_embeddings": 2048,
    "mlp_only_layers": [],
    "moe_intermediate_size": EXPERT_INNER,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}


def ensure_demo_checkpoint(path: Path) -> Path:
    """The checkpoint's directory, made on the first call: 6.6 MB, the same bytes every time."""
    if (path / "model.safetensors").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    _write_json(path / "config.json", {**CONFIG, "eos_token_id": eos})
    _write_json(path / "generation_config.json", {"eos_token_id": [eos, tokenizer.token_to_id("<|endoftext|>")]})
    _write_json(path / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    generator = torch.Generator().manual_seed(0)
    weights = {name: _weight(shape, generator) for name, shape in _shapes()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})  # last: it marks the directory as whole
    return path


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(demo_corpus(), trainer)
    return tokenizer


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (EXPERT_INNER, HIDDEN)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (EXPERT_INNER, HIDDEN)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (HIDDEN, EXPERT_INNER)


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)  # norms
    scale: float = shape[-1] ** -0.5
    return torch.randn(shape, generator=generator) * scale


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
