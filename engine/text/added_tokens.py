"""Adds the tokens that a checkpoint declares beside tokenizer.json, in tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from engine.checkpoint.config_reader import read_json_object
from engine.errors import CheckpointError

CONFIG_FILE = "tokenizer_config.json"
MAX_BYTES = 16 << 20  # the largest published ones, thousands of added tokens, are below 2 MB
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def read_tokenizer_config(path: Path) -> dict[str, object]:
    """tokenizer_config.json of a model directory, or {} if there is none. Raises CheckpointError.

    Files from before `added_tokens_decoder` keep named tokens in special_tokens_map.json: those are merged in.
    """
    file = path / CONFIG_FILE
    config = read_json_object(file, max_bytes=MAX_BYTES) if file.exists() else {}
    legacy = path / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.exists():
        config |= read_json_object(legacy, max_bytes=MAX_BYTES)
    return config


def named_special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens by their names (`eos_token`...), as a chat template sees them. Raises CheckpointError."""
    extra = config.get("extra_special_tokens")
    values = dict(config) | (extra if isinstance(extra, dict) else {})
    # A model may name tokens of its own: any string under a key that ends so.
    names = [*NAMED_TOKENS, *(extra if isinstance(extra, dict) else ())]
    names += [key for key, value in config.items() if key.endswith("_token") and isinstance(value, str)]
    found = {name: values[name] for name in dict.fromkeys(names) if values.get(name) is not None}
    return {name: _content(name, value) for name, value in found.items()}


def add_declared_tokens(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """Add the tokens that tokenizer_config.json declares and tokenizer.json lacks, as transformers does.

    Raises CheckpointError if a declared token ends up under another id than the declared one.
    """
    named = named_special_tokens(config)
    declared = _declared(config)
    tokens = [
        _added_token(value, special=value.get("special") is True or value["content"] in named.values())
        for _, value in sorted(declared.items())
    ]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {str(value["content"]) for value in declared.values()}
    for name in (*named, *_unnamed(config)):
        value = config.get(name, named.get(name, name))
        content = named.get(name, name)
        if content not in known:
            known.add(content)
            token = {"content": content} | (value if isinstance(value, dict) else {})
            tokens.append(_added_token(token, special=True))
    tokenizer.add_tokens(tokens)
    for token_id, value in declared.items():
        found = tokenizer.token_to_id(str(value["content"]))
        if found != token_id:
            raise CheckpointError(
                f"{CONFIG_FILE}: added_tokens_decoder gives {value['content']!r} id {token_id}, "
                f"tokenizer.json gives it {found}"
            )


def _declared(config: Mapping[str, object]) -> dict[int, dict[str, object]]:
    table = config.get("added_tokens_decoder", {})
    if not isinstance(table, dict):
        raise CheckpointError(f"{CONFIG_FILE}: added_tokens_decoder is {table!r}; accepted: an object")
    declared: dict[int, dict[str, object]] = {}
    for token_id, value in table.items():
        if not token_id.isdecimal() or not isinstance(value, dict):
            raise CheckpointError(
                f"{CONFIG_FILE}: added_tokens_decoder holds {token_id!r}: {value!r}; accepted: a token id and an object"
            )
        _content(f"added_tokens_decoder: {token_id}", value)
        declared[int(token_id)] = value
    return declared


def _unnamed(config: Mapping[str, object]) -> list[str]:
    tokens: list[str] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(key)
        if isinstance(value, list):
            tokens += [_content(key, item) for item in value]
    return tokens


def _added_token(value: Mapping[str, object], *, special: bool) -> AddedToken:
    flags = {flag: bool(value[flag]) for flag in TOKEN_FLAGS if flag in value}
    return AddedToken(str(value["content"]), special=special, **flags)


def _content(key: str, value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise CheckpointError(f"{CONFIG_FILE}: {key} is {value!r}; accepted: a token's text, or an object with it")
    return content
