"""Reads an encoder's shape out of config.json and sentence_bert_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.checkpoint.config_reader import NO_CODE, ConfigReader, DtypeName, refuse_unsupported, weights_dtype
from engine.checkpoint.families import ENCODERS, EncoderFamily
from engine.checkpoint.rope import RopeConfig, rope_readers
from engine.errors import CheckpointError

Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"]

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
POOLINGS = ("cls", "mean")
GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
GPT_MUST_BE_FALSE = (
    *("prenorm", "parallel_block", "use_rms_norm", "causal", "scale_attn_by_inverse_layer_idx"),
    *("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved"),
)
GATES = {"swiglu": "silu", "geglu": "gelu"}
DEFAULT_LOCAL_TOKENS, DEFAULT_FULL_EVERY = 128, 3  # ModernBERT's
ENCODER_MUST_BE_FALSE = ("is_decoder", "add_cross_attention")
ENCODER_MUST_BE_ABSENT = {
    "quantization_config": "weights not quantised beforehand: take the model in float32, bfloat16 or float16",
    "auto_map": NO_CODE,
}


@dataclass(frozen=True, slots=True)
class RotaryLayers:
    """How the layers of an encoder without learned positions rotate queries and keys, and how far each sees."""

    full: RopeConfig
    local: RopeConfig  # of `local_layers`
    local_layers: frozenset[int]
    reach: int  # tokens that these see on each side of a token

    @classmethod
    def from_reader(cls, config: ConfigReader, family: EncoderFamily, head_dim: int) -> RotaryLayers | None:
        """Read its keys, in the form of transformers 5 and the one before. Raises CheckpointError naming the key."""
        rules = family.rope
        if rules is None:
            return None
        older = {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"}
        given = {new: config.data[old] for new, old in older.items() if config.has(old)}
        full, local = rope_readers(ConfigReader({**config.data, **given}, config.source), rules, family.local_theta)
        ropes = [RopeConfig.from_reader(each or full, 0, rules, head_dim) for each in (full, local)]
        if family.local_theta is None:
            return cls(ropes[0], ropes[0], frozenset(), 0)
        reach = config.integer("local_attention", default=DEFAULT_LOCAL_TOKENS) // 2
        return cls(ropes[0], ropes[1], _local_layers(config), reach)


def _local_layers(config: ConfigReader) -> frozenset[int]:
    num_layers = config.integer("num_hidden_layers")
    if not config.has("layer_types"):
        every = config.integer("global_attn_every_n_layers", default=DEFAULT_FULL_EVERY)
        return frozenset(layer for layer in range(num_layers) if layer % every)
    kinds, found = ("full_attention", "sliding_attention"), config.data["layer_types"]
    if not isinstance(found, list) or len(found) != num_layers or not all(kind in kinds for kind in found):
        accepted = " or ".join(f'"{kind}"' for kind in kinds)
        raise config.refuse("layer_types", found, f"{accepted} for each of {num_layers} layers")
    return frozenset(layer for layer, kind in enumerate(found) if kind == kinds[1])


@dataclass(frozen=True, slots=True)
class EncoderBiases:
    """Which parts have a bias."""

    attention: bool = True
    mlp: bool = True
    norms: bool = True
    head: bool = True  # of the dense layer before the classes

    @classmethod
    def from_reader(cls, config: ConfigReader, family: EncoderFamily) -> EncoderBiases:
        """Read the keys of a family that has them. Raises CheckpointError."""
        if family.biases != "named":
            has_all = family.biases == "every"
            return cls(attention=has_all, mlp=has_all)
        keys = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
        return cls(*(config.flag(key, default=False) for key in keys))


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder (arXiv 1810.04805, 2412.13663): everything about it that is not in its tensors."""

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: Activation  # gelu is the exact one, gelu_new and gelu_pytorch_tanh are its tanh approximation
    layer_norm_eps: float
    max_position_embeddings: int  # tokens
    max_seq_length: int | None  # tokens it was trained on, as sentence_bert_config.json says; None: it does not
    num_token_types: int
    dtype: DtypeName  # of the weights on disk
    padding_id: int | None  # the token that has no position, and whose id the first one comes behind; None: from 0 on
    classifier: ClassifierConfig | None  # None: no classification head, so texts become vectors
    rotary: RotaryLayers | None = None  # None: positions are learned
    biases: EncoderBiases = EncoderBiases()
    head_pooling: Literal["cls", "mean"] = "cls"  # what a head of classes is given
    head_activation: Activation | Literal["tanh"] = "tanh"

    @property
    def architecture(self) -> str:
        """The family's name."""
        return self.family.model_type

    @property
    def longest_input(self) -> int:
        """Tokens that there are positions for."""
        return self.max_position_embeddings - (0 if self.padding_id is None else self.padding_id + 1)

    @property
    def default_max_len(self) -> int:
        """Tokens of one input unless a setting says otherwise."""
        return min(self.longest_input, self.max_seq_length or self.longest_input)

    @classmethod
    def from_hf(cls, data: Mapping[str, object], sentence: Mapping[str, object]) -> EncoderConfig:
        """Check and translate config.json and sentence_bert_config.json. Raises CheckpointError naming the key."""
        config = ConfigReader(data, "config.json")
        family = ENCODERS[config.choice("model_type", tuple(ENCODERS))]
        if family.has_gpt_keys:
            config = _from_gpt_keys(config)
        _refuse_unsupported_encoder(config, family)
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise config.refuse("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})")
        trained = ConfigReader(sentence, "sentence_bert_config.json")
        if trained.flag("do_lower_case", default=False):
            raise trained.refuse("do_lower_case", True, "false: a text is lower-cased by its tokenizer only")
        encoder = cls(
            family=family,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            intermediate_size=config.integer("intermediate_size"),
            activation=_activation(config, family.names.activation_key, family.default_activation),
            layer_norm_eps=config.number(family.names.eps_key, default=family.default_eps),
            max_position_embeddings=config.integer("max_position_embeddings"),
            max_seq_length=trained.integer("max_seq_length", minimum=2) if trained.has("max_seq_length") else None,
            num_token_types=config.integer("type_vocab_size", default=2),
            dtype=weights_dtype(config, default="float32"),  # files older than the key are float32's
            padding_id=_padding_id(config) if family.counts_from_padding else None,
            classifier=ClassifierConfig.of(config, family.classifying_class),
        )
        return _with_own_parts(encoder, config)


def _from_gpt_keys(config: ConfigReader) -> ConfigReader:
    """The keys of transformers for those that Nomic's own code reads, which are GPT-2's. Raises CheckpointError."""
    for key in GPT_MUST_BE_FALSE:
        if config.flag(key, default=False):
            raise config.refuse(key, True, "false")
    if config.has("rotary_emb_scale_base"):
        raise config.refuse("rotary_emb_scale_base", config.data["rotary_emb_scale_base"], "null")
    if config.number("rotary_emb_fraction", default=1.0) != 1:
        raise config.refuse("rotary_emb_fraction", config.data["rotary_emb_fraction"], "1.0")
    if not config.flag("scale_attn_weights", default=True):
        raise config.refuse("scale_attn_weights", False, "true")
    found = {new: config.data[old] for new, old in GPT_KEYS.items() if config.has(old)}
    if config.has("activation_function"):
        found["hidden_act"] = GATES[config.choice("activation_function", tuple(GATES))]
    if config.has("rotary_scaling_factor") and "max_position_embeddings" in found:
        # What the factor changes begins behind the positions that it was trained on.
        trained, most = config.integer("max_trained_positions", default=2048), config.integer("n_positions")
        found["max_position_embeddings"] = min(trained, most)
    data = {key: value for key, value in config.data.items() if key != "auto_map"}
    return ConfigReader({**data, **found}, config.source)


def _with_own_parts(encoder: EncoderConfig, config: ConfigReader) -> EncoderConfig:
    """The encoder with what BERT has not, or not by choice."""
    family = encoder.family
    head_dim = encoder.hidden_size // encoder.num_heads
    if config.integer("head_dim", default=head_dim) != head_dim:
        raise config.refuse("head_dim", config.data["head_dim"], f"hidden_size / num_attention_heads ({head_dim})")
    encoder = replace(
        encoder,
        rotary=RotaryLayers.from_reader(config, family, head_dim),
        biases=EncoderBiases.from_reader(config, family),
    )
    if family.head_norm is None:
        return encoder
    return replace(
        encoder,
        head_pooling=cast(Literal["cls", "mean"], config.choice("classifier_pooling", POOLINGS, default="cls")),
        head_activation=_activation(config, "classifier_activation", family.default_activation),
    )


def _activation(config: ConfigReader, key: str, default: str) -> Activation:
    return cast(Activation, config.choice(key, ACTIVATIONS, default=default))


def _padding_id(config: ConfigReader) -> int:
    """RoBERTa's is 1 where it is left out."""
    padding_id = config.integer("pad_token_id", default=1, minimum=0)
    positions = config.integer("max_position_embeddings")
    if padding_id + 1 >= positions:
        raise config.refuse("max_position_embeddings", positions, f"more than pad_token_id and 1 ({padding_id + 1})")
    return padding_id


def _refuse_unsupported_encoder(config: ConfigReader, family: EncoderFamily) -> None:
    classes, accepted = config.data.get("architectures"), (*family.classes, family.classifying_class)
    if classes is not None and (not isinstance(classes, list) or len(classes) != 1 or classes[0] not in accepted):
        raise config.refuse("architectures", classes, f"one of {', '.join(accepted)}")
    refuse_unsupported(config, absent=ENCODER_MUST_BE_ABSENT, false=ENCODER_MUST_BE_FALSE)
    config.choice("position_embedding_type", ("absolute",), default="absolute")
    if config.data.get("embedding_size") not in (None, config.data.get("hidden_size")):
        raise CheckpointError("config.json: embedding_size differs from hidden_size; accepted: the same number")
