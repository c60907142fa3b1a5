"""Every tensor of a decoder's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from engine.checkpoint.model_config import ModelConfig

Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape, in the layout of Hugging Face."""
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
