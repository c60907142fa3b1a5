"""A byte-level BPE tokenizer of 296 tokens, in the files of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"

# Each word becomes one token, built from merges of its letters left to right ("Ġ" is byte-level BPE's space).
WORDS = ("Ġthe", "Ġand", "Ġyou", "Ġare", "Ġa", "Ġis", "the", "you", "ing", "er", "system", "user", "assistant", "ĊĊ")

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tokenizer(path: Path) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json into the directory `path`; returns the tokenizer.

    Ids: 0..255 the bytes, then the merges, then SPECIAL_TOKENS in order. Any text encodes and decodes to itself.
    """
    tokenizer = build_tokenizer()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2), encoding="utf-8")
    return tokenizer


def build_tokenizer() -> Tokenizer:
    """The tokenizer in memory."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
    }
