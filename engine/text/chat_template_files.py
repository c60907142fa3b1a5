"""Finds the chat templates of a model directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.checkpoint.json_file import read_text
from engine.errors import CheckpointError

MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones are about 20 KB


def read_chat_templates(path: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Template name -> source, "default" the usual one; empty if the model has none. Raises CheckpointError.

    As in transformers: chat_template.jinja and additional_chat_templates/NAME.jinja, else `chat_template` of
    tokenizer_config.json, which is one template or a list of named ones.
    """
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").exists():
        files = {"default": path / "chat_template.jinja"} | files
    if files:
        return {name: read_text(file, max_bytes=MAX_TEMPLATE_BYTES) for name, file in files.items()}
    value = tokenizer_config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): _source(source) for name, source in value.items()}
    if not isinstance(value, list):
        raise _refuse(value)
    templates: dict[str, str] = {}
    for entry in value:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise _refuse(entry)
        templates[entry["name"]] = _source(entry.get("template"))
    return templates


def _source(value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(value)
    return value


def _refuse(value: object) -> CheckpointError:
    return CheckpointError(
        f"tokenizer_config.json: chat_template holds {value!r}; accepted: a template, or a list of "
        '{"name": ..., "template": ...}'
    )
