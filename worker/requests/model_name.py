"""What the model is called."""

from __future__ import annotations

from pathlib import Path

from settings import ModelSettings

UNNAMED = "millrace"


def served_model_name(model: ModelSettings) -> str:
    """The name that requests may give and results carry: `model.name`, else the checkpoint directory's name."""
    if model.name is not None:
        return model.name
    if model.path is None:
        return UNNAMED
    return Path(model.path).resolve().name or UNNAMED
