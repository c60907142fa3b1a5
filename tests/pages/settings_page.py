"""settings/SETTINGS.md, from the settings themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from engine.checkpoint.files import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.loading.derived_settings import derive_for
from settings import SettingRow, Settings, Source, load_settings
from tests.pages.markdown import page, plain, table

_SMALLEST_MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def settings_page() -> str:
    """Every setting, by group, in the order of declaration."""
    rows = load_settings(environ={}).rows()
    derived = _derived_keys()
    by_group: dict[str, list[SettingRow]] = {}
    for row in rows:
        by_group.setdefault(row.key.rpartition(".")[0], []).append(row)
    sections = [_section(group, about, by_group[group], derived) for group, about in _groups(Settings, "")]
    return page(
        "Settings",
        f"{len(rows)} settings. Each is set on the command line (`--set engine.max_num_seqs=64`), by the variable "
        "named below it in the environment or `.env`, or in a TOML profile that `MILLRACE_PROFILE` names; the "
        "first of these that does decides. `millrace config` shows the value in force and where it came from.",
        "Derived: left at its default, the value follows from the model and the machine; "
        "`millrace config --model DIR` shows it.",
        *sections,
    )


def _section(group: str, about: str, rows: list[SettingRow], derived: frozenset[str]) -> str:
    cells = [
        (
            f"`{row.key}`<br>`{row.variable}`",
            plain(row.accepted) + (f" ({row.unit})" if row.unit else ""),
            f"`{row.default_text}`{', derived' if row.key in derived else ''}",
            plain(row.description),
        )
        for row in rows
    ]
    return f"## {group}\n\n{about}\n\n{table(('setting, variable', 'accepted', 'default', 'what it does'), cells)}"


def _groups(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """The groups that hold settings, with what their class says of itself."""
    for name, field in model.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            yield f"{prefix}{name}", " ".join((inspect.getdoc(group) or "").split())
            yield from _groups(group, f"{prefix}{name}.")


def _derived_keys() -> frozenset[str]:
    """Those that the engine fills in for a decoder: the same on every machine, whatever their values there."""
    config: Mapping[str, object] = _SMALLEST_MODEL
    derived = derive_for(
        load_settings(environ={}),
        Path("model"),
        ModelConfig.from_hf(config),
        open_checkpoint=lambda path: Checkpoint({}),
    )
    return frozenset(key for key in derived.origins if derived.source_of(key) in {Source.DERIVED, Source.ESTIMATED})
