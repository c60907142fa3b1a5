"""What sets each family of models apart, as data. Nothing else in the engine knows a family by its name.

A family that differs from the others in this data alone is one entry here. One whose arithmetic differs needs a field
of a layer in `engine.models` as well, filled from a field here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.checkpoint.rope import DEFAULT_ROPE, RopeRules

Activation = Literal["silu", "gelu_tanh"]  # of an MLP's gate; GELU by its tanh form


@dataclass(frozen=True, slots=True)
class SharedExpertNames:
    """What a family calls the expert that every token goes through, and how wide it is in config.json."""

    module: str  # of a layer
    projections: tuple[str, ...]  # gate, up, down; or gate and up in one, and down
    size_key: str  # rows of gate and of up; 0: there is no such expert
    count_key: str | None = None  # how many times as many rows there are, 1 if left out; None: as many
    gate: str | None = None  # of a layer: one row, whose sigmoid scales what the expert adds; None: nothing does


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls its experts in the weights, and how wide they are in config.json."""

    module: str  # of a layer
    projections: tuple[str, ...]  # of one expert: gate, up, down; where experts are fused: gate and up in one, and down
    size_key: str  # rows of gate and of up
    # Whether the weights of the chosen experts are scaled to sum to 1: always, or as `norm_topk_prob` says.
    renormalises: Literal["always", "if asked", "unless asked not to"] = "if asked"
    router: str = "gate"  # of the module
    count_keys: tuple[str, str] = ("num_local_experts", "num_experts")  # the newer one, and the older
    first_key: str | None = None  # how many layers, from the first on, have a dense MLP, 1 if left out; None: 0
    # How a token scores experts. softmax: over all of them. grouped sigmoid: each by itself; those of the best groups
    # are chosen from, by scores to which the router's `e_score_correction_bias` is added (arXiv 2412.19437).
    scoring: Literal["softmax", "grouped sigmoid"] = "softmax"
    is_fused: bool = False  # the file has all experts of a layer in one tensor
    # So it has, and biases, the router's too; the SwiGLU's sides are clamped, and gate and up come by turns.
    is_biased: bool = False
    shared: SharedExpertNames | None = None


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a family calls the norms of a layer, by where they stand; None: there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of what attention adds
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None  # of what the MLP adds


PRE_NORM = NormNames()


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A family of decoders: layers of grouped-query attention with rotary positions, and SwiGLU MLPs.

    Defaults are transformers' for that family: what a config.json that leaves the key out means.
    """

    model_type: str  # in config.json
    generating_class: str  # in config.json's `architectures`
    norms: NormNames = PRE_NORM
    qk_norm: bool | tuple[str, bool] = False  # RMSNorm over each query and key head; or a key of config.json, likewise
    plus_one_norms: bool = False  # the file has the weights of norms less 1
    wide_qk_norm: bool = False  # RMSNorm over all query heads together, and over all key heads
    # A bias of the projections of queries, keys and values; or the key of config.json that says so, and its default.
    qkv_bias: bool | tuple[str, bool] = False
    has_biases: bool = False  # of all four projections of attention, which `attention_bias` must not deny
    has_sinks: bool = False  # a learned score more of each query head
    fuses_projections: bool = False  # the file has qkv_proj and gate_up_proj
    experts: ExpertNames | None = None  # None: every MLP is dense
    activation: Activation = "silu"
    scales_embedding: bool = False  # by the root of hidden_size, rounded to the dtype of the weights
    has_query_scalar: bool = False  # products of queries and keys are divided by the root of query_pre_attn_scalar
    # Caps of attention's scores and of logits where config.json leaves them out, 0: none. None: the family has no caps.
    default_soft_caps: tuple[float, float] | None = None
    has_multipliers: bool = False  # config.json scales embedding, attention, what layers add, and logits
    extra_layers_key: str | None = None  # how many layers of drafts the file has behind the model's, 1 if left out
    skips_rope: bool = False  # config.json names layers whose queries and keys are not rotated
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope: RopeRules = DEFAULT_ROPE
    # Layers with a window have a rope of their own, with this theta where config.json says none: 0, that of the others.
    local_theta: float | None = None  # None: all layers have one rope
    ties_by_default: bool = False
    # Whether num_key_value_heads may be left out, for one KV head a query head, as Llama 2 files do. transformers gives
    # Qwen3 files without it 32 or 4 heads, whatever the model: there it must be named, or be null.
    kv_heads_may_be_left_out: bool = False
    # What `sliding_window` means. none: it must be null. off: nothing, and `use_sliding_window` must be false. named:
    # every layer has it. default: likewise, and left out it is 4096. switched: where `use_sliding_window` is true, the
    # layers from `max_window_layers` on have it, or those that `layer_types` names.
    # mixed: it is 4096 where it is left out, in all layers but each `full_every`th or, where `layer_types` is there, in
    # those that this names.
    window: Literal["none", "off", "named", "default", "switched", "mixed"] = "none"
    full_every: int = 0
    default_window: int = 4096  # tokens, of `default`, `switched` and `mixed`
    default_dtype: Literal["bfloat16"] | None = None  # of weights whose file does not say it; None: it must
    bare_name: str | None = None  # of the classes without a head of tokens, where it is not the generating class's

    @property
    def body_class(self) -> str:
        """The class in `architectures` of a model without a head, of which embeddings are made."""
        return f"{self._bare_name}Model"

    @property
    def classifying_class(self) -> str:
        """The class in `architectures` of a model with a classification head."""
        return f"{self._bare_name}ForSequenceClassification"

    @property
    def _bare_name(self) -> str:
        return self.bare_name or self.generating_class.removesuffix("ForCausalLM")


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """What a family of encoders calls its tensors, and the keys of config.json that are not BERT's.

    Projections that have a tensor each are named one by one, those that have one together by its one name.
    """

    words: str = "embeddings.word_embeddings"
    positions: str | None = "embeddings.position_embeddings"  # None: queries and keys are rotated instead
    types: str | None = "embeddings.token_type_embeddings"  # None: a text of a pair is like another
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)  # of gated MLPs: what is activated, and what it is multiplied with
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str | None = None  # None: there is none
    activation_key: str = "hidden_act"
    eps_key: str = "layer_norm_eps"


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders: layers of bidirectional attention."""

    model_type: str
    classes: tuple[str, ...]  # in config.json's `architectures`; heads beyond the body are left out
    classifying_class: str  # likewise, of a model with a classification head
    root: str  # before the names of the body's tensors where there is a head beside it
    left_out: tuple[str, ...]  # what the names of other heads' tensors begin with
    head: tuple[str, str]  # the modules of the classification head: a dense layer with an activation, and the classes
    names: EncoderNames = EncoderNames()
    # Whether positions count from behind the padding token's id on, as fairseq's do, which RoBERTa was trained with.
    counts_from_padding: bool = False
    head_norm: str | None = None  # behind the head's dense layer, whose activation and pooling config.json then names
    norms_first: bool = False  # of each half of a layer, and of the first layer's MLP alone; else of the sum behind it
    is_gated: bool = False  # the MLP
    # every: projections and norms. named: those that config.json says. norms: theirs and the head's alone.
    biases: Literal["every", "named", "norms"] = "every"
    rope: RopeRules | None = None  # None: learned positions
    # Layers that see only tokens nearby have this theta where config.json says none; None: all layers see everything.
    local_theta: float | None = None
    default_eps: float = 1e-12
    default_activation: Literal["gelu", "silu"] = "gelu"
    # Older files of the family come with code, which is not run: it does what this does, by other keys.
    has_gpt_keys: bool = False


LLAMA = DecoderFamily("llama", "LlamaForCausalLM", kv_heads_may_be_left_out=True)
QWEN2 = DecoderFamily("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window="switched")
QWEN3 = DecoderFamily("qwen3", "Qwen3ForCausalLM", qk_norm=True, default_head_dim=128, window="switched")
QWEN3_MOE = DecoderFamily(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    qk_norm=True,
    experts=ExpertNames("mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size"),
    window="off",
)
QWEN2_MOE = DecoderFamily(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    qkv_bias=("qkv_bias", True),
    experts=ExpertNames(
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "moe_intermediate_size",
        shared=SharedExpertNames(
            "mlp.shared_expert",
            ("gate_proj", "up_proj", "down_proj"),
            "shared_expert_intermediate_size",
            gate="mlp.shared_expert_gate",
        ),
    ),
    window="off",
)
MISTRAL = DecoderFamily("mistral", "MistralForCausalLM", window="default")
MIXTRAL = DecoderFamily(
    "mixtral",
    "MixtralForCausalLM",
    experts=ExpertNames("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", renormalises="always"),
    rope=RopeRules(default_theta=1_000_000.0),
    window="named",
)
PHI3 = DecoderFamily(
    "phi3",
    "Phi3ForCausalLM",
    fuses_projections=True,
    # By "su" and "yarn" it means longrope, and transformers' yarn is another: those names are not read.
    rope=RopeRules(rope_types=("default", "longrope"), may_be_partial=True),
    kv_heads_may_be_left_out=True,
    window="named",
)
SMOLLM3 = DecoderFamily(
    "smollm3",
    "SmolLM3ForCausalLM",
    skips_rope=True,
    rope=RopeRules(default_theta=2_000_000.0),
    ties_by_default=True,
    window="off",
)
GRANITE = DecoderFamily("granite", "GraniteForCausalLM", has_multipliers=True, kv_heads_may_be_left_out=True)
_GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe",
    ("input_linear", "output_linear"),
    "intermediate_size",
    renormalises="always",
    router="router.layer",
    is_fused=True,
)
GRANITE_MOE = replace(
    GRANITE, model_type="granitemoe", generating_class="GraniteMoeForCausalLM", experts=_GRANITE_EXPERTS
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    generating_class="GraniteMoeSharedForCausalLM",
    experts=replace(
        _GRANITE_EXPERTS,
        shared=SharedExpertNames("shared_mlp", ("input_linear", "output_linear"), "shared_intermediate_size"),
    ),
)
OLMO2 = DecoderFamily(
    "olmo2",
    "Olmo2ForCausalLM",
    norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    wide_qk_norm=True,
    kv_heads_may_be_left_out=True,
)
GLM4_MOE = DecoderFamily(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    qk_norm=("use_qk_norm", False),
    qkv_bias=("attention_bias", False),
    experts=ExpertNames(
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "moe_intermediate_size",
        renormalises="unless asked not to",
        count_keys=("n_routed_experts", "num_local_experts"),
        first_key="first_k_dense_replace",
        scoring="grouped sigmoid",
        shared=SharedExpertNames(
            "mlp.shared_experts",
            ("gate_proj", "up_proj", "down_proj"),
            "moe_intermediate_size",
            count_key="n_shared_experts",
        ),
    ),
    extra_layers_key="num_nextn_predict_layers",
    rope=RopeRules(may_be_partial=True, default_share=0.5),
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    generating_class="Olmo3ForCausalLM",
    rope=RopeRules(default_theta=500_000.0),
    local_theta=0.0,
    window="mixed",
    full_every=4,
)
GEMMA2 = DecoderFamily(
    "gemma2",
    "Gemma2ForCausalLM",
    norms=NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    plus_one_norms=True,
    activation="gelu_tanh",
    scales_embedding=True,
    has_query_scalar=True,
    default_soft_caps=(50.0, 30.0),
    default_head_dim=256,
    ties_by_default=True,
    window="mixed",
    full_every=2,
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    generating_class="Gemma3ForCausalLM",
    bare_name="Gemma3Text",
    qk_norm=True,
    default_soft_caps=(0.0, 0.0),
    rope=RopeRules(default_theta=1_000_000.0),
    local_theta=10_000.0,
    full_every=6,
)
GPT_OSS = DecoderFamily(
    "gpt_oss",
    "GptOssForCausalLM",
    has_biases=True,
    has_sinks=True,
    experts=ExpertNames("mlp", (), "intermediate_size", renormalises="always", router="router", is_biased=True),
    default_head_dim=64,
    # transformers has a yarn of this family's own for files that name none. There is no such file.
    rope=RopeRules(default_theta=150_000.0, rope_types=("yarn",), must_be_named=True),
    window="mixed",
    full_every=2,
    default_window=128,
    default_dtype="bfloat16",
)
BERT = EncoderFamily(
    model_type="bert",
    classes=("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    classifying_class="BertForSequenceClassification",
    root="bert.",
    left_out=("cls.",),
    head=("bert.pooler.dense", "classifier"),
)
ROBERTA = EncoderFamily(
    model_type="roberta",
    classes=("RobertaModel", "RobertaForMaskedLM"),
    classifying_class="RobertaForSequenceClassification",
    root="roberta.",
    left_out=("lm_head.",),
    head=("classifier.dense", "classifier.out_proj"),
    counts_from_padding=True,
)
XLM_ROBERTA = replace(
    ROBERTA,
    model_type="xlm-roberta",
    classes=("XLMRobertaModel", "XLMRobertaForMaskedLM"),
    classifying_class="XLMRobertaForSequenceClassification",
)
MODERNBERT = EncoderFamily(
    model_type="modernbert",
    classes=("ModernBertModel", "ModernBertForMaskedLM"),
    classifying_class="ModernBertForSequenceClassification",
    root="model.",
    left_out=("head.", "decoder."),
    head=("head.dense", "classifier"),
    names=EncoderNames(
        words="embeddings.tok_embeddings",
        positions=None,
        types=None,
        embedding_norm="embeddings.norm",
        layer="layers",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        attention_norm="attn_norm",
        up=("mlp.Wi",),
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        final_norm="final_norm",
        activation_key="hidden_activation",
        eps_key="norm_eps",
    ),
    head_norm="head.norm",
    norms_first=True,
    is_gated=True,
    biases="named",
    rope=RopeRules(default_theta=160_000.0, rope_types=("default",)),
    local_theta=10_000.0,
    default_eps=1e-5,
)
NOMIC_BERT = EncoderFamily(
    model_type="nomic_bert",
    classes=("NomicBertModel", "NomicBertForMaskedLM"),
    classifying_class="NomicBertForSequenceClassification",
    root="nomic_bert.",
    left_out=("cls.",),
    head=("nomic_bert.pooler.dense", "classifier"),
    names=EncoderNames(
        positions=None,
        embedding_norm="emb_ln",
        layer="encoder.layers",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        attention_norm="norm1",
        up=("mlp.fc12", "mlp.fc11"),
        down="mlp.fc2",
        mlp_norm="norm2",
    ),
    is_gated=True,
    biases="norms",
    rope=RopeRules(default_theta=1000.0, rope_types=("default",)),
    default_activation="silu",
    has_gpt_keys=True,
)

DECODERS = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        MISTRAL,
        MIXTRAL,
        PHI3,
        SMOLLM3,
        GRANITE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        OLMO2,
        GLM4_MOE,
        OLMO3,
        GEMMA2,
        GEMMA3,
        GPT_OSS,
    )
}
ENCODERS = {family.model_type: family for family in (BERT, ROBERTA, XLM_ROBERTA, MODERNBERT, NOMIC_BERT)}
# Families that people ask for and that no entry can describe, and why.
_MLA = (
    "whose latent attention (MLA) keeps one compressed vector a token, which this KV cache of keys and values does not"
)
_TURNED = (
    "whose queries and keys are rotated in pairs of neighbouring dimensions: these kernels pair the halves of a head"
)
REFUSED = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3"), _MLA),
    **dict.fromkeys(("glm", "glm4"), _TURNED),
}
