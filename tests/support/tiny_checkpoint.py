"""Writes small random checkpoints of each model family with transformers, and asks transformers for the right answers.

The oracle of the parity tests is transformers' own greedy continuation, with the margin of every choice; for models
that embed it is the same network pooled by hand.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from engine.checkpoint.embedding_config import Pooling
from engine.checkpoint.model_config import ModelConfig, read_config
from engine.checkpoint.weights import Checkpoint
from engine.models.decoder import DecoderModel
from engine.models.load import load_decoder
from engine.models.placement import ModelPlacement
from kernels.dispatch import operations
from tests.support.tiny_families import FAMILY_DEFAULTS, Family
from tests.support.tiny_tokenizer import EOS_TOKEN, PAD_TOKEN, make_tokenizer

Head = Literal["none", "tokens", "classes"]
EncoderName = Literal["bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"]

# The tokenizer knows fewer ids than the model, as with published Qwen3 checkpoints: the last ids decode to nothing.
VOCAB_SIZE = 320

DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # The usual 0.02 leaves logits so close together that rounding decides between them.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

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
# As published: one segment, and positions that begin behind the padding token's id.
_LIKE_ROBERTA: dict[str, Any] = {"type_vocab_size": 1, "max_position_embeddings": 130, "pad_token_id": 1}
ENCODER_DEFAULTS: dict[EncoderName, dict[str, Any]] = {
    "bert": {},
    "roberta": _LIKE_ROBERTA,
    "xlm-roberta": _LIKE_ROBERTA,
    "modernbert": {
        "local_attention": 16,  # tokens; inputs of the tests have more
        **dict.fromkeys(("bos_token_id", "cls_token_id"), 2),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 3),
        "pad_token_id": 0,
    },
    "nomic_bert": {},
}
SWITCHES: dict[Pooling, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last_token": "pooling_mode_lasttoken",
}

TIE = 1e-4  # two logits closer than this are a tie: rounding may decide between them

CPU = torch.device("cpu")


def make_checkpoint(
    path: Path,
    family: Family = "qwen3",
    *,
    seed: int = 0,
    max_shard_size: str | int = "5GB",
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint with tokenizer and generation config into `path`; returns `path`.

    `config_overrides` are the Hugging Face config's own names; `max_shard_size="20KB"` splits the weights into
    several files with an index.
    """
    tokenizer = make_tokenizer(path)
    model = make_model(family, seed=seed, **config_overrides)
    ending = [tokenizer.token_to_id(EOS_TOKEN), tokenizer.token_to_id(PAD_TOKEN)]
    model.generation_config = GenerationConfig(eos_token_id=ending, pad_token_id=ending[1])
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def make_model(family: Family = "qwen3", *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """The same model in memory, in evaluation mode. Leaves the global random state as it was."""
    options = options_of(family, config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(family, options)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Made as ones and as zeros, which would hide one that is left out or swapped with another.
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
    return model.eval()


def options_of(family: Family, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a tiny checkpoint's config.json, in transformers' names."""
    options = copy.deepcopy(DEFAULTS | FAMILY_DEFAULTS[family]) | dict(overrides)
    for of_each_layer in ("no_rope_layers", "layer_types"):
        if options.get(of_each_layer):
            options[of_each_layer] = options[of_each_layer][: options["num_hidden_layers"]]
    return options


def _build(family: Family, options: dict[str, Any]) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    for parameter in model.parameters():  # model.to() would also round the rotary frequencies
        parameter.data = parameter.data.to(getattr(torch, options["dtype"]))
    return model


def make_body_checkpoint(path: Path, family: Family = "qwen3", **config_overrides: Any) -> Path:
    """A decoder as AutoModel saves it: no head, and tensors named without `model.`."""
    make_tokenizer(path)
    make_model(family, **config_overrides).model.save_pretrained(path)
    return path


def make_bert_checkpoint(
    path: Path, *, head: Head = "none", family: EncoderName = "bert", seed: int = 0, **config_overrides: Any
) -> Path:
    """An encoder with a WordPiece tokenizer; `head`: that of pre-training or of classes, with `bert.` before names."""
    make_word_piece_tokenizer(path)
    options = copy.deepcopy(BERT_DEFAULTS) | ENCODER_DEFAULTS[family] | config_overrides
    kinds: dict[Head, Any] = {
        "none": AutoModel,
        "tokens": AutoModelForMaskedLM,
        "classes": AutoModelForSequenceClassification,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kinds[head].from_config(AutoConfig.for_model(family, **options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # norms are made as ones, biases as zeros
                if "norm" in name.lower() or "bias" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def make_classifying_decoder(path: Path, family: Family = "qwen3", *, seed: int = 0, **config_overrides: Any) -> Path:
    """A decoder with a head of classes in place of that of tokens."""
    tokenizer = make_tokenizer(path)
    # Some families' defaults are ids of their own vocabulary, which this one does not have.
    special = {"eos_token_id": tokenizer.token_to_id(EOS_TOKEN), "pad_token_id": tokenizer.token_to_id(PAD_TOKEN)}
    options = options_of(family, special | config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
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
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
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
        """The embedding of one input: [H] or [dimensions], of length 1."""
        ids = torch.tensor([list(token_ids)])
        hidden = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(dim=0), "last_token": hidden[-1]}[self._pooling]
        return torch.nn.functional.normalize(pooled[:dimensions], dim=0)


class ReferenceClassifier:
    """transformers' logits of classes, of token ids or of texts: these in one batch, padded."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._has_segments = getattr(self._model.config, "type_vocab_size", 1) > 1

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], second_start: int | None = None) -> torch.Tensor:
        """Of one input, or of a pair whose second text begins there: [C]."""
        ids = torch.tensor([list(token_ids)])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self._has_segments and second_start is not None:
            given["token_type_ids"] = (torch.arange(ids.shape[1]) >= second_start).long()[None]
        found: torch.Tensor = self._model(**given).logits[0]
        return found

    @torch.inference_mode()
    def logits_of_texts(
        self, first: Sequence[str], second: Sequence[str] | None = None, max_length: int | None = None
    ) -> torch.Tensor:
        """Of texts, or of pairs, cut to `max_length` tokens: [n, C]."""
        cut = max_length is not None
        given = self._tokenizer(
            list(first), second, truncation=cut, max_length=max_length, padding=True, return_tensors="pt"
        )
        if not self._has_segments:
            given.pop("token_type_ids", None)
        found: torch.Tensor = self._model(**given).logits
        return found


@dataclass(frozen=True)
class ReferenceContinuation:
    """What transformers generates greedily after a prompt."""

    token_ids: list[int]
    margins: list[float]  # best minus second best logit at each step, of the tokens that may be chosen
    logits: torch.Tensor  # [num_tokens, V], float32


def continue_greedily(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, suppressed: Sequence[int]
) -> list[ReferenceContinuation]:
    """Continue each prompt without the `suppressed` ids; prompts of one length share a batch: nothing is padded."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    results: dict[int, ReferenceContinuation] = {}
    for indices in by_length.values():
        ids = torch.tensor([list(prompts[index]) for index in indices])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(suppressed),
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(out.logits, dim=1).float()  # [batch, num_tokens, V]
        best = torch.stack(out.scores, dim=1).topk(2, dim=-1).values
        for row, index in enumerate(indices):
            results[index] = ReferenceContinuation(
                token_ids=out.sequences[row, ids.shape[1] :].tolist(),
                margins=(best[row, :, 0] - best[row, :, 1]).tolist(),
                logits=logits[row],
            )
    return [results[index] for index in range(len(prompts))]


def count_ties_where_it_differs(expected: ReferenceContinuation, found: Sequence[int]) -> int:
    """0 if equal, 1 if they first differ at a tie of the reference; fails for any other difference."""
    assert len(found) == len(expected.token_ids)
    for step, (wanted, got) in enumerate(zip(expected.token_ids, found, strict=True)):
        if wanted != got:
            margin = expected.margins[step]
            assert margin <= TIE, f"step {step}: token {got}, not {wanted}, at a margin of {margin}"
            return 1
    return 0


def decoder_config(path: Path) -> ModelConfig:
    """The decoder's configuration from config.json in a model directory."""
    config = read_config(path)
    assert isinstance(config, ModelConfig)
    return config


def load_alone(path: Path) -> DecoderModel:
    """The model without an engine, in float32 on the CPU."""
    placement = ModelPlacement(CPU, torch.float32, operations(CPU), max_positions=64, bucketed_min_tokens=8)
    with Checkpoint.open(path) as checkpoint:
        return load_decoder(decoder_config(path), checkpoint, placement)
