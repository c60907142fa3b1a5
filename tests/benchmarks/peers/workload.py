"""Makes the prompts that both sides are given, and the two models.

The models are Hugging Face directories with random weights in bfloat16.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.loading.quantize import quantise_checkpoint
from tests.support.tiny_checkpoint import make_model
from tests.support.tiny_families import Family
from tests.support.tiny_tokenizer import SPECIAL_TOKENS, tokenizer_config

VOCAB_SIZE = 32_768
MAX_POSITIONS = 8192
BLOCK_TOKENS = 16  # that both engines share or do not share together
NUM_RESERVED_IDS = 3  # the tokenizer's last ids are special tokens; a prompt holds none

_BOTH: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
MODELS: Mapping[str, tuple[Family, dict[str, Any]]] = {
    "dense": (
        "qwen3",
        _BOTH
        | {
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        },
    ),
    "moe": (
        "qwen3_moe",
        _BOTH
        | {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1536,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
}


@dataclass(frozen=True)
class Workload:
    """Requests of one length that arrive together: greedy, `max_tokens` each, the end of sequence ignored."""

    name: str
    model: str  # of MODELS
    num_groups: int  # 0: nothing shared
    prefix_tokens: int  # that the requests of a group begin with
    own_tokens: int
    num_requests: int = 64
    max_tokens: int = 64

    @property
    def prompt_tokens(self) -> int:
        """Tokens of one prompt."""
        return self.prefix_tokens + self.own_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens to compute if each prefix is computed once."""
        return self.num_groups * self.prefix_tokens + self.num_requests * self.own_tokens

    def prompts(self, seed: int) -> list[list[int]]:
        """`num_requests` prompts in shuffled order. Other seeds share no prefix with these."""
        generator = random.Random(f"{self.name} {seed}")
        prefixes = [_tokens(generator, self.prefix_tokens) for _ in range(self.num_groups)] or [[]]
        prompts = [
            prefixes[number % len(prefixes)] + _tokens(generator, self.own_tokens)
            for number in range(self.num_requests)
        ]
        generator.shuffle(prompts)
        return prompts

    def sized(self, num_requests: int, max_tokens: int, prompt_tokens: int | None = None) -> Workload:
        """This workload with other numbers of requests and tokens. The same share of a prompt is its own, in blocks."""
        prefix = self.prefix_tokens
        if prompt_tokens is not None:
            prefix = prompt_tokens * prefix // self.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        return replace(
            self,
            num_requests=num_requests,
            max_tokens=max_tokens,
            prefix_tokens=prefix,
            own_tokens=(prompt_tokens or self.prompt_tokens) - prefix,
        )


def _tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE - NUM_RESERVED_IDS) for _ in range(count)]


WORKLOADS = {
    workload.name: workload
    for model in ("dense", "moe")
    for workload in (
        Workload(f"{model}-shared", model, num_groups=4, prefix_tokens=384, own_tokens=64),
        Workload(f"{model}-unshared", model, num_groups=0, prefix_tokens=0, own_tokens=448),
    )
}


def checkpoint(model: str, cache: Path) -> Path:
    """The directory of `model` below `cache`; it is made (ten seconds, 0.4 GB) if it is missing."""
    path = cache / model
    if not (path / "complete").exists():
        _write(model, path)
        (path / "complete").touch()
    return path


def quantised(path: Path, scheme: str) -> Path:
    """The checkpoint `path` in a `scheme` of `millrace quantize`, beside it; it is written if it is missing."""
    target = path.with_name(f"{path.name}-{scheme}")
    if not target.exists():
        quantise_checkpoint(path, target, scheme)
    return target


def _write(model: str, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    family, shape = MODELS[model]
    make_model(family, seed=0, **shape).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    # transformers 4, which OpenVINO's exporter brings, reads the base of the rotary frequencies from here.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(path)


def write_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write the tokenizer's two files."""
    build_tokenizer(vocab_size).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=1))


def build_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens: bytes, pairs of bytes, then triples, special tokens.

    Every id of the model stands for a text, as in a real checkpoint: nothing is masked, everything is detokenised.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = map("".join, product(alphabet, alphabet))
    longer = chain(product(alphabet, alphabet), product(pairs, alphabet))
    merges = list(islice(longer, vocab_size - len(alphabet) - NUM_RESERVED_IDS))
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer
