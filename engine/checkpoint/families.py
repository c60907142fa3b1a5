"""What sets each family of models apart, as data. Nothing else in the engine knows a family by its name.

A family that differs from the others in this data alone is one entry here. One whose arithmetic differs needs a field
of a layer in `engine.models` as well, filled from a field here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A family of decoders: pre-norm layers of grouped-query attention with rotary positions, and SwiGLU MLPs.

    Defaults are transformers' for that family: what a config.json that leaves the key out means.
    """

    model_type: str  # in config.json
    generating_class: str  # in config.json's `architectures`
    qk_norm: bool  # RMSNorm over each query and key head
    has_experts: bool
    default_head_dim: int | None  # None: hidden_size / num_attention_heads
    # Whether num_key_value_heads may be left out, for one KV head a query head, as Llama 2 files do. transformers gives
    # Qwen3 files without it 32 or 4 heads, whatever the model: there it must be named, or be null.
    kv_heads_may_be_left_out: bool
    # Whether `use_sliding_window` says if `sliding_window` is in use; where it does not, the latter must be null.
    switches_window: bool

    @property
    def body_class(self) -> str:
        """The class in `architectures` of a model without a head, of which embeddings are made."""
        return self.generating_class.replace("ForCausalLM", "Model")


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders: post-norm layers of bidirectional attention with learned positions."""

    model_type: str
    classes: tuple[str, ...]  # in config.json's `architectures`; heads beyond the body are left out


LLAMA = DecoderFamily(
    model_type="llama",
    generating_class="LlamaForCausalLM",
    qk_norm=False,
    has_experts=False,
    default_head_dim=None,
    kv_heads_may_be_left_out=True,
    switches_window=False,
)
QWEN3 = DecoderFamily(
    model_type="qwen3",
    generating_class="Qwen3ForCausalLM",
    qk_norm=True,
    has_experts=False,
    default_head_dim=128,
    kv_heads_may_be_left_out=False,
    switches_window=True,
)
QWEN3_MOE = DecoderFamily(
    model_type="qwen3_moe",
    generating_class="Qwen3MoeForCausalLM",
    qk_norm=True,
    has_experts=True,
    default_head_dim=None,
    kv_heads_may_be_left_out=False,
    switches_window=True,
)
BERT = EncoderFamily(model_type="bert", classes=("BertModel", "BertForMaskedLM", "BertForPreTraining"))

DECODERS = {family.model_type: family for family in (LLAMA, QWEN3, QWEN3_MOE)}
ENCODERS = {family.model_type: family for family in (BERT,)}
