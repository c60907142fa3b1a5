"""A tiny tokenizer with a chat template, and answers as its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken

from engine.request import Completion, FinishReason
from engine.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import EOS_TOKEN, build_tokenizer, tokenizer_config

TEMPLATES = Path(__file__).parent / "jinja"
# Which of the texts that templates give a meaning are special tokens. Qwen3's tokenizer has the marks as plain tokens.
QWEN3_TOKENS = {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False}
HERMES_TOKENS = dict.fromkeys(QWEN3_TOKENS, True)
LLAMA3_TOKENS = {"<|python_tag|>": True, "<|eot_id|>": True, "<|start_header_id|>": True, "<|end_header_id|>": True}


def template_source(name: str) -> str:
    """A template of tests/support/jinja."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def chat_model(path: Path, template: str, tokens: Mapping[str, bool]) -> Tokenizer:
    """The tokenizer, written into the directory `path`; `tokens`: added token -> whether it is special."""
    tokenizer = build_tokenizer()
    added = {
        special: [AddedToken(text, special=special) for text in tokens if tokens[text] is special]
        for special in (True, False)
    }
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = tokenizer_config() | {"bos_token": "<|endoftext|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_directory(path)


def answered(
    tokenizer: Tokenizer,
    text: str,
    *,
    finish_reason: FinishReason = FinishReason.STOP,
    stop: str | None = None,
    index: int = 0,
) -> Completion:
    """A completion of `text` as the engine ends it; `stop`: the stop string that `text` holds and that ended it."""
    token_ids = tokenizer.encode(text)
    if finish_reason is FinishReason.STOP and stop is None:
        token_ids += tokenizer.encode(EOS_TOKEN)
    shown = tokenizer.decode(token_ids)
    if stop is not None:
        shown = shown[: shown.index(stop)]
    return Completion(index, shown, tuple(token_ids), finish_reason, stop, None)
