"""Where a model's files may be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.errors import CheckpointError
from settings import ModelSettings, SettingsError

_TEMPLATES = "additional_chat_templates"  # the one folder of a checkpoint that is read


def model_directory(model: ModelSettings) -> Path:
    """The directory of model.path, links followed where there is a model.root; it need not exist.

    Raises CheckpointError where no path is set, and SettingsError where it is not under the root.
    """
    if model.path is None:
        raise CheckpointError("no model: set model.path (--model DIR)")
    if model.root is None:
        return model.path
    root = model.root.resolve()
    directory = (root / model.path).resolve()
    if not directory.is_relative_to(root):
        raise SettingsError(
            "model.path", str(model.path), f"leads to {directory}", accepted=f"a directory under {root}"
        )
    return directory


def check_files_are_under_root(directory: Path, model: ModelSettings) -> None:
    """Raises CheckpointError naming the first file of a checkpoint that a link leads out of model.root.

    Hugging Face's cache keeps its files under hashes and links to them: those stay within its root.
    """
    if model.root is None:
        return
    root = model.root.resolve()
    for file in _files(directory):
        if not file.resolve().is_relative_to(root):
            raise CheckpointError(f"{file}: leads to {file.resolve()}; accepted: a file under model.root ({root})")


def _files(directory: Path) -> Iterator[Path]:
    for folder in (directory, directory / _TEMPLATES):
        if folder.is_dir():
            yield from sorted(folder.iterdir())
