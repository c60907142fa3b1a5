"""Reads a model's shape, decoder or encoder, out of config.json, and the ids that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.checkpoint.config_reader import (
    MAX_CONFIG_BYTES,
    NO_CODE,
    ConfigReader,
    DtypeName,
    read_json_object,
    refuse_unsupported,
    weights_dtype,
)
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.families import DECODERS, ENCODERS, PRE_NORM, REFUSED, Activation, DecoderFamily, NormNames
from engine.checkpoint.moe_config import MoeConfig
from engine.checkpoint.quantization_config import MXFP4, QuantizationConfig
from engine.checkpoint.rope import RopeConfig, rope_readers
from engine.checkpoint.token_scores import read_token_scores, with_saved_activation
from engine.errors import CheckpointError

MUST_BE_FALSE = (
    *("attention_bias", "mlp_bias", "add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention"),
)
DEFAULT_FIRST_WINDOWED = 28  # layer, of Qwen2
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
MUST_BE_ABSENT = {
    "compression_config": "null: quantization_config is its newer name",
    "auto_map": NO_CODE,
    # What other families' attention or residual stream does, found in files that call themselves by these names.
    **dict.fromkeys(
        (
            *MULTIPLIERS,
            *CAPS,
            "attention_chunk_size",
            "no_rope_layers",
            "qk_layernorm",
        ),
        "null: not part of this architecture here",
    ),
}


def read_config(path: Path) -> ModelConfig | EncoderConfig:
    """The shape of the model in directory `path`; and what the files of sentence-transformers say of it.

    Raises CheckpointError.
    """
    data = read_json_object(path / "config.json", max_bytes=MAX_CONFIG_BYTES)
    model_type = data.get("model_type")
    if model_type in ENCODERS:
        trained = path / "sentence_bert_config.json"
        encoder = EncoderConfig.from_hf(
            data, read_json_object(trained, max_bytes=MAX_CONFIG_BYTES) if trained.exists() else {}
        )
        return replace(encoder, classifier=with_saved_activation(path, encoder.classifier))
    if model_type not in DECODERS:
        accepted = ", ".join((*DECODERS, *ENCODERS))
        reason = f", {REFUSED[model_type]}" if isinstance(model_type, str) and model_type in REFUSED else ""
        raise CheckpointError(f"config.json: model_type is {model_type!r}{reason}; accepted: {accepted}")
    decoder = ModelConfig.from_hf(data)
    classifier = read_token_scores(path, ConfigReader(data, "config.json")) or decoder.classifier
    if classifier is not None and classifier.token_logits and decoder.logits_cap is not None:
        raise CheckpointError("config.json: final_logit_softcapping caps the logits that make a score; accepted: null")
    return replace(decoder, classifier=with_saved_activation(path, classifier))


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What a family scales (Granite): the embedding, what each half of a layer adds, and the logits."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0  # they are divided by it
    rounds_embedding: bool = False  # that of the embedding, to the dtype of the weights

    @classmethod
    def from_reader(cls, config: ConfigReader, family: DecoderFamily) -> Multipliers:
        """Read the three keys, 1 where one is left out; families without them scale the embedding alone, if that.

        Raises CheckpointError naming the key.
        """
        if family.scales_embedding:
            return cls(embedding=config.integer("hidden_size") ** 0.5, rounds_embedding=True)
        if not family.has_multipliers:
            return cls()
        return cls(
            embedding=config.number("embedding_multiplier", default=1.0),
            residual=config.number("residual_multiplier", default=1.0),
            logits=config.number("logits_scaling", default=1.0),
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder: everything about the model that is not in its tensors."""

    architecture: str  # the family's name, config.json's model_type
    vocab_size: int  # rows of the embedding; the tokenizer may know fewer ids
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of a dense MLP
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    qk_norm: bool  # RMSNorm over each query and key head
    moe: MoeConfig | None
    dtype: DtypeName  # of the weights on disk that are not quantised
    attention_scale: float  # of the products of queries and keys
    norms: NormNames = PRE_NORM
    wide_qk_norm: bool = False  # RMSNorm over all query heads together, and over all key heads
    plus_one_norms: bool = False  # the file has the weights of norms less 1
    activation: Activation = "silu"
    attention_cap: float | None = None  # c: a score s of attention becomes c * tanh(s / c)
    logits_cap: float | None = None  # likewise of logits
    local_rope: RopeConfig | None = None  # of `local_layers`; None: all layers have `rope`
    local_layers: frozenset[int] = frozenset()  # those meant to have a window, even if no sequence is longer than it
    window: int | None = None  # tokens that a query of some layers sees at most, its own included
    windowed_layers: frozenset[int] = frozenset()  # of these
    unrotated_layers: frozenset[int] = frozenset()  # whose queries and keys are not rotated by their position
    multipliers: Multipliers = Multipliers()
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's last projection
    has_sinks: bool = False  # a learned score more of each query head
    fuses_projections: bool = False  # the file has qkv_proj and gate_up_proj
    quantization: QuantizationConfig | None = None  # None: no layer is quantised
    num_extra_layers: int = 0  # of drafts, which the file has behind the model's and which are not read
    classifier: ClassifierConfig | None = None  # of a head of classes in place of that of tokens; None: there is none

    @classmethod
    def from_hf(cls, data: Mapping[str, object]) -> ModelConfig:
        """Check and translate the content of a config.json. Raises CheckpointError naming the key."""
        config = ConfigReader(data, "config.json")
        family = _decoder_family(config)
        _refuse_unsupported_decoder(config, family)
        quantization = _quantization(config, family)
        num_layers = config.integer("num_hidden_layers")
        num_heads = config.integer("num_attention_heads")
        max_position_embeddings = config.integer("max_position_embeddings")
        head_dim = _head_dim(config, family, num_heads)
        full, _ = rope_readers(config, family.rope, family.local_theta)
        rope = RopeConfig.from_reader(full, max_position_embeddings, family.rope, head_dim)
        model = cls(
            architecture=family.model_type,
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(config, family, num_heads),
            head_dim=head_dim,
            intermediate_size=config.integer("intermediate_size"),
            rms_norm_eps=config.number("rms_norm_eps"),
            rope=rope,
            max_position_embeddings=rope.stretched(max_position_embeddings),
            tie_word_embeddings=config.flag("tie_word_embeddings", default=family.ties_by_default),
            qk_norm=_switched(config, family.qk_norm),
            moe=MoeConfig.from_reader(config, family.experts, num_layers) if family.experts else None,
            dtype=weights_dtype(config, default=family.default_dtype),
            attention_scale=_attention_scale(config, family, head_dim),
            norms=family.norms,
            wide_qk_norm=family.wide_qk_norm,
            plus_one_norms=family.plus_one_norms,
            activation=family.activation,
            multipliers=Multipliers.from_reader(config, family),
            qkv_bias=family.has_biases or _switched(config, family.qkv_bias),
            fuses_projections=family.fuses_projections,
            quantization=quantization,
            num_extra_layers=_num_extra_layers(config, family),
            classifier=ClassifierConfig.of(config, family.classifying_class),
        )
        return _with_caps_and_windows(model, config, family)

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees at most, its own included; None: all up to its own."""
        return self.window if layer in self.windowed_layers else None

    @property
    def kept_tokens(self) -> int | None:
        """The last tokens of a sequence that any layer still sees; None: all."""
        return self.window if len(self.windowed_layers) == self.num_layers else None

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts rather than a dense MLP."""
        return self.moe is not None and layer in self.moe.sparse_layers


def _with_caps_and_windows(model: ModelConfig, config: ConfigReader, family: DecoderFamily) -> ModelConfig:
    """The model with what few families have, or only some of its layers."""
    attention_cap, logits_cap = _soft_caps(config, family)
    num_layers = model.num_layers
    _, local = rope_readers(config, family.rope, family.local_theta)
    local_rope = None
    if local is not None:
        original = config.integer("max_position_embeddings")
        local_rope = RopeConfig.from_reader(local, original, family.rope, model.head_dim)
    window = _window(config, family, model.max_position_embeddings)
    sliding_layers = _sliding_layers(config, family, num_layers, window)
    return replace(
        model,
        output_bias=family.has_biases,
        has_sinks=family.has_sinks,
        attention_cap=attention_cap,
        logits_cap=logits_cap,
        window=window,
        windowed_layers=sliding_layers if window is not None else frozenset(),
        local_rope=local_rope,
        local_layers=sliding_layers if local_rope is not None else frozenset(),
        unrotated_layers=_unrotated_layers(config, num_layers) if family.skips_rope else frozenset(),
    )


def _decoder_family(config: ConfigReader) -> DecoderFamily:
    family = DECODERS[config.choice("model_type", tuple(DECODERS))]
    accepted = (family.generating_class, family.body_class, family.classifying_class)
    classes = config.data.get("architectures")
    if classes is not None and classes not in [[name] for name in accepted]:
        quoted = " or ".join(f'["{name}"]' for name in accepted)
        raise config.refuse("architectures", classes, f"{quoted} for model_type {family.model_type!r}")
    return family


def _refuse_unsupported_decoder(config: ConfigReader, family: DecoderFamily) -> None:
    own = {*(MULTIPLIERS if family.has_multipliers else ()), *(("no_rope_layers",) if family.skips_rope else ())}
    own |= {*(CAPS if family.default_soft_caps else ())}
    absent = {key: accepted for key, accepted in MUST_BE_ABSENT.items() if key not in own}
    switches = {has[0] for has in (family.qkv_bias, family.qk_norm) if not isinstance(has, bool)}
    switches |= {"attention_bias"} if family.has_biases else set()
    refuse_unsupported(config, absent=absent, false=[key for key in MUST_BE_FALSE if key not in switches])
    if family.has_biases and not config.flag("attention_bias", default=True):
        raise config.refuse("attention_bias", False, "true")
    if config.has("sliding_window") and family.window == "none":
        raise config.refuse("sliding_window", config.data["sliding_window"], "null")
    if family.window != "switched" and config.flag("use_sliding_window", default=False):
        raise config.refuse("use_sliding_window", True, "false")
    _refuse_activation(config, family)
    if not config.flag("is_causal", default=True):
        raise config.refuse("is_causal", False, "true: a token sees none that follow it")


def _quantization(config: ConfigReader, family: DecoderFamily) -> QuantizationConfig | None:
    """Experts in one tensor, with biases, are read in one format, which others are not read in."""
    found = QuantizationConfig.from_reader(config)
    is_biased = family.experts is not None and family.experts.is_biased
    if found is not None and (found.method == MXFP4) != is_biased:
        accepted = f"{MXFP4} or no quantization_config" if is_biased else "another quant_method"
        raise config.refuse("quantization_config", {"quant_method": found.method}, accepted)
    return found


def _refuse_activation(config: ConfigReader, family: DecoderFamily) -> None:
    """Files of Gemma have it under a key of their own, and some under both, where the newer one says "gelu" and means
    its tanh form.
    """
    if family.activation == "silu":
        config.choice("hidden_act", ("silu",), default="silu")
        return
    config.choice("hidden_activation", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    config.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), default="gelu_pytorch_tanh")


def _soft_caps(config: ConfigReader, family: DecoderFamily) -> tuple[float | None, float | None]:
    """Of attention and of logits. A key that is null means none, one that is left out the family's."""
    caps = [
        config.number(key) if config.has(key) else 0.0 if key in config.data else default
        for key, default in zip(CAPS, family.default_soft_caps or (0.0, 0.0), strict=True)
    ]
    return caps[0] or None, caps[1] or None


def _window(config: ConfigReader, family: DecoderFamily, max_position_embeddings: int) -> int | None:
    """None too where it holds the longest sequence."""
    if family.window in ("none", "off") or (
        family.window == "switched" and not config.flag("use_sliding_window", default=False)
    ):
        return None
    is_left_out = "sliding_window" not in config.data
    if not config.has("sliding_window") and not (is_left_out and family.window in ("default", "switched", "mixed")):
        return None
    window = config.integer("sliding_window", default=family.default_window)
    return window if window < max_position_embeddings else None


def _sliding_layers(config: ConfigReader, family: DecoderFamily, num_layers: int, window: int | None) -> frozenset[int]:
    """Those that have the window, if there is one. A `sliding_window` that no layer type asks for is not in use."""
    if not config.has("layer_types"):
        if family.window == "mixed":
            every = config.integer("sliding_window_pattern", default=family.full_every)
            return frozenset(layer for layer in range(num_layers) if (layer + 1) % every)
        is_upper = family.window == "switched"
        first = config.integer("max_window_layers", default=DEFAULT_FIRST_WINDOWED, minimum=0) if is_upper else 0
        return frozenset(range(first, num_layers)) if window is not None else frozenset()
    kinds: tuple[str, ...] = ("full_attention",)
    if family.window == "mixed" or (family.window == "switched" and config.flag("use_sliding_window", default=False)):
        kinds = ("full_attention", "sliding_attention")
    elif family.window in ("named", "default") and window is not None:
        kinds = ("sliding_attention",)
    layer_types = config.data["layer_types"]
    is_known = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not isinstance(layer_types, list) or not is_known or not all(kind in kinds for kind in layer_types):
        accepted = " or ".join(f'"{kind}"' for kind in kinds)
        raise config.refuse("layer_types", layer_types, f"{accepted} for each of {num_layers} layers")
    return frozenset(layer for layer, kind in enumerate(layer_types) if kind == "sliding_attention")


def _attention_scale(config: ConfigReader, family: DecoderFamily, head_dim: int) -> float:
    """Granite's is 1 where it is left out, and not that of the head's size; Gemma's has a number of its own."""
    if family.has_query_scalar:
        return float(config.number("query_pre_attn_scalar", default=256.0) ** -0.5)
    scale: float = config.number("attention_multiplier", default=1.0) if family.has_multipliers else head_dim**-0.5
    return scale


def _num_extra_layers(config: ConfigReader, family: DecoderFamily) -> int:
    return config.integer(family.extra_layers_key, default=1, minimum=0) if family.extra_layers_key else 0


def _switched(config: ConfigReader, has: bool | tuple[str, bool]) -> bool:
    """What every model of a family has or has not, or a key of config.json says, with its default."""
    return has if isinstance(has, bool) else config.flag(has[0], default=has[1])


def _unrotated_layers(config: ConfigReader, num_layers: int) -> frozenset[int]:
    """`no_rope_layers` has a 0 for each layer that is not rotated; left out, that is every fourth."""
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", default=4)
        return frozenset(range(interval - 1, num_layers, interval))
    flags = config.integers("no_rope_layers")
    if len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise config.refuse("no_rope_layers", flags, f"0 or 1 for each of {num_layers} layers")
    return frozenset(layer for layer, is_rotated in enumerate(flags) if not is_rotated)


def _num_kv_heads(config: ConfigReader, family: DecoderFamily, num_heads: int) -> int:
    explicit_null = "num_key_value_heads" in config.data
    default = num_heads if family.kv_heads_may_be_left_out or explicit_null else None
    num_kv_heads = config.integer("num_key_value_heads", default=default)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(config: ConfigReader, family: DecoderFamily, num_heads: int) -> int:
    hidden_size = config.integer("hidden_size")
    if config.has("head_dim"):
        head_dim = config.integer("head_dim")
    elif family.default_head_dim is not None:
        head_dim = family.default_head_dim
    elif hidden_size % num_heads:
        raise config.refuse("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise config.refuse("head_dim", head_dim, "an even number: rotary embedding turns pairs")
    return head_dim


def read_eos_token_ids(path: Path, vocab_size: int) -> frozenset[int]:
    """The token ids that end a sequence; where there are none, only lengths and stop strings do.

    From generation_config.json, or config.json where the former names no id. Sampling defaults in the file
    (temperature, top_p...) are not read: a request's parameters are its own. Raises CheckpointError naming file, key
    and value, and for an id that the model does not have.
    """
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if name == "config.json" or file.exists():
            config = ConfigReader(read_json_object(file, max_bytes=MAX_CONFIG_BYTES), name)
            if config.has("eos_token_id"):
                return _eos_token_ids(config, vocab_size)
    return frozenset()


def _eos_token_ids(config: ConfigReader, vocab_size: int) -> frozenset[int]:
    is_list = isinstance(config.data["eos_token_id"], list)
    ids = config.integers("eos_token_id") if is_list else [config.integer("eos_token_id", minimum=0)]
    beyond = sorted(token_id for token_id in ids if token_id >= vocab_size)
    if beyond:
        raise CheckpointError(f"eos_token_id {beyond[0]} is outside the vocabulary; accepted: 0 to {vocab_size - 1}")
    return frozenset(ids)
