"""The configuration of models for embeddings: pooling, and encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.embedding_config import EmbeddingConfig, Pooling
from engine.checkpoint.encoder_config import EncoderBiases, EncoderConfig
from engine.checkpoint.families import DECODERS, ENCODERS
from engine.checkpoint.model_config import ModelConfig, read_config
from engine.errors import CheckpointError
from tests.support.tiny_checkpoint import make_checkpoint, write_pooling

# The keys of all-MiniLM-L6-v2's file.
MINILM: dict[str, Any] = {
    "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 384, "initializer_range": 0.02,
    "intermediate_size": 1536, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 6, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.8.2", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip

# nomic-ai/nomic-embed-text-v1.5, without what only its training reads
NOMIC: dict[str, Any] = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 30528,
}
# answerdotai/ModernBERT-base
MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "vocab_size": 50368,
}


def _read(path: Path, config: dict[str, Any] | None = None) -> EmbeddingConfig:
    (path / "config.json").write_text(json.dumps(config or {}))
    return EmbeddingConfig.from_directory(path, size=64, default="mean")


@pytest.mark.parametrize("pooling", ["mean", "last_token", "cls"])
def test_sentence_transformers_files_say_what_is_pooled(tmp_path: Path, pooling: Pooling) -> None:
    write_pooling(tmp_path, pooling)
    found = _read(tmp_path)
    assert found.pooling == pooling
    assert found.needs_every_position == (pooling != "last_token")


def test_newer_files_name_the_pooling(tmp_path: Path) -> None:
    write_pooling(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "embedding_dimension": 64}')
    assert _read(tmp_path).pooling == "last_token"


def test_without_files_it_is_the_familys(tmp_path: Path) -> None:
    assert _read(tmp_path).pooling == "mean"


@pytest.mark.parametrize(
    "switches",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": False},
        {"pooling_mode": "weightedmean"},
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, switches: dict[str, object]) -> None:
    write_pooling(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]', "Dense"),
        ('[{"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}]', "a folder of this directory"),
        ('{"0": "Transformer"}', "a list of objects"),
        ("[", "not valid JSON"),
    ],
)
def test_modules_that_cannot_be_run_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("config", "accepted", "refused"),
    [
        ({}, [64], [1, 32, 63, 65]),
        ({"is_matryoshka": False}, [64], [32]),
        ({"is_matryoshka": True}, [1, 32, 64], [0, 65]),
        ({"matryoshka_dimensions": [32, 16]}, [16, 32, 64], [1, 17]),
    ],
)
def test_vectors_may_be_cut_where_the_config_says_so(
    tmp_path: Path, config: dict[str, Any], accepted: list[int], refused: list[int]
) -> None:
    dimensions = _read(tmp_path, config).dimensions
    assert all(length in dimensions for length in accepted)
    assert not any(length in dimensions for length in refused)


def test_longer_vectors_than_the_models_cannot_be_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"matryoshka_dimensions is \[128\]"):
        _read(tmp_path, {"matryoshka_dimensions": [128]})


def test_a_published_file_is_understood() -> None:
    config = EncoderConfig.from_hf(MINILM, {"max_seq_length": 256, "do_lower_case": False})
    assert (config.num_layers, config.num_heads, config.dtype) == (6, 12, "float32")
    assert config.default_max_len == 256
    assert EncoderConfig.from_hf(MINILM, {}).default_max_len == 512


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "distilbert"},
        {"architectures": ["BertForTokenClassification"]},
        {"architectures": ["RobertaModel"]},
        {"hidden_size": 385},
        {"hidden_act": "mish"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"auto_map": {"AutoModel": "modeling.Model"}},
        {"quantization_config": {"bits": 8}},
        {"embedding_size": 128},
        {"layer_norm_eps": 0},
    ],
)
def test_what_is_not_bert_is_refused_by_key(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        EncoderConfig.from_hf(MINILM | change, {})


def test_a_published_file_of_modernbert_is_understood() -> None:
    config = EncoderConfig.from_hf(MODERNBERT, {})
    assert (config.num_layers, config.layer_norm_eps, config.default_max_len) == (22, 1e-5, 8192)
    assert config.biases == EncoderBiases(attention=False, mlp=False, norms=False, head=False)
    rotary = config.rotary
    assert rotary is not None
    assert (rotary.full.theta, rotary.local.theta, rotary.reach) == (160_000.0, 10_000.0, 64)
    assert rotary.local_layers == set(range(22)) - set(range(0, 22, 3))
    classifying = EncoderConfig.from_hf(MODERNBERT | {"architectures": ["ModernBertForSequenceClassification"]}, {})
    assert (classifying.head_pooling, classifying.head_activation) == ("mean", "gelu")
    assert classifying.classifier is not None


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_activation": "mish"},
        {"classifier_pooling": "max"},
        {"classifier_activation": "mish"},
        {"local_attention": 0},
        {"global_attn_every_n_layers": 0},
        {"global_rope_theta": -1},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["chunked_attention"] * 22},
        {"head_dim": 32},
        {"norm_bias": 1},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}},
    ],
)
def test_what_is_not_modernbert_is_refused_by_key(change: dict[str, Any]) -> None:
    key = "rope_theta" if "global_rope_theta" in change else "rope_type" if "rope_scaling" in change else min(change)
    with pytest.raises(CheckpointError, match=key):
        EncoderConfig.from_hf(MODERNBERT | change, {})


def test_a_published_file_of_nomic_is_understood() -> None:
    config = EncoderConfig.from_hf(NOMIC, {})
    assert (config.hidden_size, config.num_layers, config.num_heads, config.intermediate_size) == (768, 12, 12, 3072)
    assert (config.activation, config.layer_norm_eps, config.longest_input) == ("silu", 1e-12, 8192)
    assert config.biases == EncoderBiases(attention=False, mlp=False)
    assert config.rotary is not None
    assert (config.rotary.full.theta, config.rotary.local_layers) == (1000.0, frozenset())
    assert EncoderConfig.from_hf(NOMIC | {"rotary_scaling_factor": 2}, {}).longest_input == 2048


@pytest.mark.parametrize(
    "change",
    [
        {"prenorm": True},
        {"qkv_proj_bias": True},
        {"mlp_fc1_bias": True},
        {"rotary_emb_interleaved": True},
        {"rotary_emb_fraction": 0.5},
        {"rotary_emb_scale_base": 512},
        {"scale_attn_weights": False},
        {"activation_function": "gelu"},
        {"causal": True},
    ],
)
def test_what_is_not_nomics_bert_is_refused_by_key(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"{min(change)} is"):
        EncoderConfig.from_hf(NOMIC | change, {})


def test_a_text_is_not_lower_cased_before_its_tokenizer() -> None:
    with pytest.raises(CheckpointError, match=r"sentence_bert_config\.json: do_lower_case is True; accepted: false"):
        EncoderConfig.from_hf(MINILM, {"do_lower_case": True})


def test_the_kind_of_model_is_read_off_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINILM))
    assert isinstance(read_config(tmp_path), EncoderConfig)
    assert isinstance(read_config(make_checkpoint(tmp_path / "qwen3")), ModelConfig)
    (tmp_path / "config.json").write_text(json.dumps(MINILM | {"model_type": "distilbert"}))
    accepted = ", ".join([*DECODERS, *ENCODERS])
    with pytest.raises(CheckpointError, match=f"model_type is 'distilbert'; accepted: {accepted}"):
        read_config(tmp_path)
