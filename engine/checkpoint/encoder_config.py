"""What config.json says about an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from engine.checkpoint.common_config import DtypeName, refuse_unsupported, weights_dtype
from engine.checkpoint.config_reader import ConfigReader
from engine.errors import CheckpointError

Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]

CLASSES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
MUST_BE_FALSE = ("is_decoder", "add_cross_attention")
MUST_BE_ABSENT = {
    "quantization_config": "null: quantised weights are not supported",
    "auto_map": "null: code from a checkpoint is never run",
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of a BERT encoder (arXiv 1810.04805): everything about it that is not in its tensors."""

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

    @property
    def architecture(self) -> str:
        """The family's name."""
        return "bert"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def default_max_len(self) -> int:
        """Tokens of one input unless a setting says otherwise."""
        return min(self.max_position_embeddings, self.max_seq_length or self.max_position_embeddings)

    @classmethod
    def from_hf(cls, data: Mapping[str, object], sentence: Mapping[str, object]) -> EncoderConfig:
        """Check and translate config.json and sentence_bert_config.json. Raises CheckpointError naming the key."""
        config = ConfigReader(data, "config.json")
        _refuse_what_is_not_supported(config)
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise config.refuse("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads})")
        trained = ConfigReader(sentence, "sentence_bert_config.json")
        if trained.flag("do_lower_case", default=False):
            raise trained.refuse("do_lower_case", True, "false: a text is lower-cased by its tokenizer only")
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            intermediate_size=config.integer("intermediate_size"),
            activation=cast(Activation, config.choice("hidden_act", ACTIVATIONS, default="gelu")),
            layer_norm_eps=config.number("layer_norm_eps", default=1e-12),
            max_position_embeddings=config.integer("max_position_embeddings"),
            max_seq_length=trained.integer("max_seq_length", minimum=2) if trained.has("max_seq_length") else None,
            num_token_types=config.integer("type_vocab_size", default=2),
            dtype=weights_dtype(config, default="float32"),  # files older than the key are float32's
        )


def _refuse_what_is_not_supported(config: ConfigReader) -> None:
    config.choice("model_type", ("bert",))
    classes = config.data.get("architectures")
    if classes is not None and (not isinstance(classes, list) or len(classes) != 1 or classes[0] not in CLASSES):
        raise config.refuse("architectures", classes, f"one of {', '.join(CLASSES)}")
    refuse_unsupported(config, absent=MUST_BE_ABSENT, false=MUST_BE_FALSE)
    config.choice("position_embedding_type", ("absolute",), default="absolute")
    if config.data.get("embedding_size") not in (None, config.data.get("hidden_size")):
        raise CheckpointError("config.json: embedding_size differs from hidden_size; accepted: the same number")
