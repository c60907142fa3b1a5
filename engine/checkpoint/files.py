"""Finds the files of a checkpoint: its directory, bound to `model.root`, and those with its weights. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.config_reader import read_json_object
from engine.errors import CheckpointError
from settings import ModelSettings, SettingsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20  # the index of Qwen3-235B, 118 files, takes 3.3 MB
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz")

_TEMPLATES = "additional_chat_templates"  # the one folder of a checkpoint that is read


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files to open, and the index that says what is in them, if there is one."""

    directory: Path
    file_names: tuple[str, ...]
    index: dict[str, str] | None  # tensor name -> file name

    @classmethod
    def find(cls, directory: Path) -> WeightFiles:
        """Look for model.safetensors, else for the index and its shards.

        Raises CheckpointError: no directory, no safetensors (naming what is there instead), both forms at once, an
        index that is malformed or names a file that is absent or outside the directory.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: there is no such directory")
        single, index = (directory / SINGLE_FILE).exists(), (directory / INDEX_FILE).exists()
        if single and index:
            raise CheckpointError(f"{directory}: has both {SINGLE_FILE} and {INDEX_FILE}; accepted: one of them")
        if (directory / "adapter_config.json").exists():
            raise CheckpointError(f"{directory}: has adapter_config.json; adapters are not supported, merge them first")
        if single:
            return cls(directory, (SINGLE_FILE,), None)
        if index:
            weight_map = _read_index(directory)
            return cls(directory, tuple(sorted(set(weight_map.values()))), weight_map)
        raise CheckpointError(f"{directory}: {_nothing_found(directory)}")


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    weight_map = read_json_object(path, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty; accepted: tensor name -> file name")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{path}: weight_map puts tensor {name} into {file_name!r}; accepted: a file of this directory"
            )
        if not file_name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: weight_map names {file_name!r}; accepted: *.safetensors")
    for file_name in sorted(set(weight_map.values())):
        if not (directory / file_name).is_file():
            raise CheckpointError(f"{path}: names {file_name}, which is not there")
    return weight_map


def _nothing_found(directory: Path) -> str:
    wanted = f"accepted: {SINGLE_FILE}, or {INDEX_FILE} and its files"
    others = sorted(file.name for file in directory.iterdir() if file.suffix in OTHER_FORMATS)
    if others:
        return f"has {', '.join(others[:3])} only, which this engine does not open (pickles run code); {wanted}"
    return f"has no weights; {wanted}"


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
