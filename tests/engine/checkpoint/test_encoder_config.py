from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.model_config import EncoderConfig, ModelConfig, read_config
from engine.errors import CheckpointError
from tests.support.tiny_checkpoint import make_checkpoint

# The keys of all-MiniLM-L6-v2's file.
MINILM: dict[str, Any] = {
    "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 384, "initializer_range": 0.02,
    "intermediate_size": 1536, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 6, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.8.2", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip


def test_a_published_file_is_understood() -> None:
    config = EncoderConfig.from_hf(MINILM, {"max_seq_length": 256, "do_lower_case": False})
    assert (config.num_layers, config.head_dim, config.dtype) == (6, 32, "float32")
    assert config.default_max_len == 256
    assert EncoderConfig.from_hf(MINILM, {}).default_max_len == 512


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "roberta"},
        {"architectures": ["BertForSequenceClassification"]},
        {"hidden_size": 385},
        {"hidden_act": "silu"},
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


def test_a_text_is_not_lower_cased_before_its_tokenizer() -> None:
    with pytest.raises(CheckpointError, match=r"sentence_bert_config\.json: do_lower_case is True; accepted: false"):
        EncoderConfig.from_hf(MINILM, {"do_lower_case": True})


def test_the_kind_of_model_is_read_off_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINILM))
    assert isinstance(read_config(tmp_path), EncoderConfig)
    assert isinstance(read_config(make_checkpoint(tmp_path / "qwen3")), ModelConfig)
    (tmp_path / "config.json").write_text(json.dumps(MINILM | {"model_type": "roberta"}))
    with pytest.raises(CheckpointError, match="model_type is 'roberta'; accepted: llama, qwen3, qwen3_moe, bert"):
        read_config(tmp_path)
