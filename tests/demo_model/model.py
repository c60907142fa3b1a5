"""The model: transformers' own Qwen3-MoE, so that its checkpoint is one by construction."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.demo_model.batch import Batch
from tests.demo_model.tokenizer import END, PAD, special_id

NUM_EXPERTS, TOP_K = 8, 2


def make_model(tokenizer: Tokenizer, seed: int) -> Qwen3MoeForCausalLM:
    """Untrained, float32."""
    end_id, pad_id = special_id(tokenizer, END), special_id(tokenizer, PAD)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end_id, pad_id], pad_token_id=pad_id)
    return model


def predict(model: Qwen3MoeForCausalLM, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits [N, V] for `batch.targets`, and each layer's router logits.

    The shared system prompt goes through the model once, not once an example.
    """
    size = batch.ids.shape[0]
    cache = model.model(batch.prefix_ids, use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys = layer.keys.expand(size, -1, -1, -1)
        layer.values = layer.values.expand(size, -1, -1, -1)
    output = model.model(batch.ids[:, :-1], past_key_values=cache, use_cache=True, output_router_logits=True)
    return model.lm_head(output.last_hidden_state[batch.foretells]), output.router_logits


def balance_loss(router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """1 where every expert gets as many tokens as the others, more where some get none."""
    loss: torch.Tensor = load_balancing_loss_func(router_logits, NUM_EXPERTS, TOP_K)
    return loss
