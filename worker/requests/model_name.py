"""What the model is called."""

from __future__ import annotations

from engine.checkpoint.files import model_directory
from settings import ModelSettings

UNNAMED = "millrace"


def served_model_name(model: ModelSettings) -> str:
    """The name that requests may give and results carry: `model.name`, else the checkpoint directory's name.

    Raises SettingsError for a path that is not under model.root.
    """
    if model.name is not None:
        return model.name
    if model.path is None:
        return UNNAMED
    return model_directory(model).resolve().name or UNNAMED
