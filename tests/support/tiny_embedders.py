"""Small random checkpoints of models that embed, and the reference for what they answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

from engine.checkpoint.embedding_config import Pooling
from tests.support.tiny_checkpoint import Family, make_model
from tests.support.tiny_tokenizer import make_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT_VOCAB_SIZE = len(SPECIAL_TOKENS) + 2 * len(LETTERS)
BERT_DEFAULTS: dict[str, Any] = {
    "vocab_size": BERT_VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
SWITCHES: dict[Pooling, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last_token": "pooling_mode_lasttoken",
}


def make_body_checkpoint(path: Path, family: Family = "qwen3", **config_overrides: Any) -> Path:
    """A decoder as AutoModel saves it: no head, and tensors named without `model.`."""
    make_tokenizer(path)
    make_model(family, **config_overrides).model.save_pretrained(path)
    return path


def make_bert_checkpoint(path: Path, *, masked_lm: bool = False, seed: int = 0, **config_overrides: Any) -> Path:
    """An encoder with a WordPiece tokenizer; `masked_lm`: with the head of pre-training, and `bert.` before names."""
    make_word_piece_tokenizer(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(**(BERT_DEFAULTS | config_overrides))
        model: PreTrainedModel = BertForMaskedLM(config) if masked_lm else BertModel(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # norms are born as ones, biases as zeros
                if "LayerNorm" in name or "bias" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def make_word_piece_tokenizer(path: Path) -> None:
    """Letters, alone and within words, in the files of a published BERT; truncation and padding are asked for."""
    pieces = [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True))
    config = {"tokenizer_class": "BertTokenizerFast", "clean_up_tokenization_spaces": True, "do_lower_case": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config | named))


def write_pooling(path: Path, pooling: Pooling, *, normalize: bool = True) -> None:
    """The files that sentence-transformers saves beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    switches = {name: name == SWITCHES[pooling] for name in (*SWITCHES.values(), "pooling_mode_max_tokens")}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 1, **switches}))


class ReferenceEmbedder:
    """transformers' hidden states, pooled as sentence-transformers' Pooling and Normalize modules define it."""

    def __init__(self, path: Path, pooling: Pooling) -> None:
        self._model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        self._pooling = pooling

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int], dimensions: int | None = None) -> torch.Tensor:
        """[H], or [dimensions], of length 1."""
        ids = torch.tensor([list(token_ids)])
        hidden = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(dim=0), "last_token": hidden[-1]}[self._pooling]
        return torch.nn.functional.normalize(pooled[:dimensions], dim=0)
