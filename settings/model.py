"""The checkpoint, its name, and the formats of its output: the group `model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from settings.fields import NAMES_FORMS, Accepted, Name, Names, SettingsGroup, read_names

ToolCallFormat = Literal[
    "auto",
    "qwen3",
    "qwen3_coder",
    "llama3",
    "pythonic",
    "olmo3",
    "mistral",
    "mistral_v11",
    "granite",
    "harmony",
    "none",
]
ReasoningFormat = Literal["auto", "qwen3", "harmony", "none"]


class ModelSettings(SettingsGroup):
    """Which model runs, and what it is called in results."""

    path: Annotated[Path, Accepted("the directory of a checkpoint in Hugging Face layout")] | None = Field(
        default=None, description="Checkpoint directory: config.json, *.safetensors and tokenizer.json."
    )
    root: Annotated[Path, Accepted("the directory that holds all checkpoints")] | None = Field(
        default=None,
        description="Where checkpoints may be: model.path is taken under it, and no link may lead out of it.",
    )
    name: Annotated[Name, Accepted("a name of 1 to 256 characters that can be printed")] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Model name accepted in requests and written in results; none: the directory's name.",
    )
    aliases: Annotated[Names, Accepted(f"{NAMES_FORMS}; * for any that no worker has")] | None = Field(
        default=None,
        description="Further names that mean this model, such as gpt-4o-mini; *: every name that means no other.",
    )
    tool_call_format: ToolCallFormat = Field(
        default="auto",
        description="How the model writes tool calls: qwen3 (also Hermes) and qwen3_coder between <tool_call> marks, "
        "llama3 as bare JSON, pythonic as a list of Python's calls, olmo3 as lines of them between <function_calls> "
        "marks, mistral and mistral_v11 behind [TOOL_CALLS], granite behind <|tool_call|>, harmony in channels; none: "
        "calls stay text; auto: what the chat template shows, and tools are refused where it shows none of these.",
    )
    reasoning_format: ReasoningFormat = Field(
        default="auto",
        description="How the model writes reasoning: before </think>, harmony in a channel; none: it stays text; auto: "
        "what the chat template shows.",
    )

    @property
    def alias_names(self) -> tuple[str, ...]:
        """The names in `aliases`, `*` among them."""
        return read_names(self.aliases)
