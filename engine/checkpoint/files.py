"""Finds the files of a checkpoint: its directory, bound to `model.root`, and those with its weights. Torch-free."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.config_reader import MAX_CONFIG_BYTES, read_json, read_json_object
from engine.errors import CheckpointError
from settings import ModelSettings, SettingsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20  # the index of Qwen3-235B, 118 files, takes 3.3 MB
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
MODULES_FILE = "modules.json"  # sentence-transformers'
TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 128 << 20  # Qwen3's takes 11 MB, Gemma 3's 33 MB
WHOLE_BYTES = 16 << 20  # a file this small is read whole for the fingerprint
SAMPLED_BLOCKS, BLOCK_BYTES = 1024, 4096  # of a larger one
_LOADED_NAMES = (
    *(CONFIG_FILE, INDEX_FILE, "generation_config.json", "sentence_bert_config.json", MODULES_FILE),
    "config_sentence_transformers.json",
    *(TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)
GGUF = ".gguf"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz")

_ACCEPTED = "the directory of a checkpoint in Hugging Face's layout: config.json, *.safetensors, tokenizer.json"
_GGUF = (
    "GGUF, which this engine does not read; take the model it was made from, in Hugging Face's layout with "
    "*.safetensors (the GGUF's page on the hub names it)"
)
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)")
_HUB_ADDRESS = re.compile(r"https?:/+(?:huggingface\.co|hf\.co)/([\w.-]+)/([\w.-]+).*")
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
        if (directory / ADAPTER_FILE).exists():
            raise CheckpointError(f"{directory}: has {ADAPTER_FILE}; adapters are not supported, merge them first")
        if single:
            return cls(directory, (SINGLE_FILE,), None)
        if index:
            weight_map = _read_index(directory)
            return cls(directory, tuple(sorted(set(weight_map.values()))), weight_map)
        raise CheckpointError(f"{directory}: {_nothing_found(directory)}")


def read_modules(directory: Path) -> list[dict[str, object]]:
    """What sentence-transformers runs one after the other; empty without its file. Raises CheckpointError."""
    file = directory / MODULES_FILE
    modules = read_json(file, max_bytes=MAX_CONFIG_BYTES) if file.exists() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{file}: holds no list of modules; accepted: a list of objects")
    return modules


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


def fingerprint(model: ModelSettings) -> str:
    """What tells one checkpoint from another: 32 hexadecimal digits of its files' names, sizes and contents.

    Of the files that are loaded, no others. Of a large one SAMPLED_BLOCKS blocks are read, spread evenly: fine-tuned
    weights differ nearly everywhere, and a merged adapter in whole matrices. Of nothing where no path is set: "".
    Raises CheckpointError and SettingsError.
    """
    if model.path is None:
        return ""
    directory = model_directory(model)
    check_is_checkpoint(directory, model.path)
    check_files_are_under_root(directory, model)
    digest = hashlib.blake2b(digest_size=16)
    for file in _loaded(directory):
        try:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(directory)} {size}\n".encode())
            for block in _sample(file, size):
                digest.update(block)
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}; accepted: a file that can be read") from error
    return digest.hexdigest()


def _loaded(directory: Path) -> Iterator[Path]:
    """Weights, configurations, tokenizer and templates, in one order everywhere."""
    weights = (directory / name for name in WeightFiles.find(directory).file_names)
    inner = (*directory.glob(f"*/{CONFIG_FILE}"), *directory.glob(f"{_TEMPLATES}/*.jinja"))
    for file in (*weights, *(directory / name for name in _LOADED_NAMES), *sorted(inner)):
        if file.is_file():  # no pipe, which would have no end
            yield file


def _sample(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            yield stream.read(size)
            return
        for block in range(SAMPLED_BLOCKS):
            stream.seek((size - BLOCK_BYTES) * block // (SAMPLED_BLOCKS - 1))
            yield stream.read(BLOCK_BYTES)


def check_is_checkpoint(directory: Path, written: Path) -> None:
    """Raises CheckpointError saying what model.path, `written`, leads to instead of a checkpoint, and what to do next.

    directory: what `model_directory` makes of it. Whether its files are whole is for those who read them.
    """
    if not directory.exists():
        raise CheckpointError(_nothing_there(directory, str(written)))
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {_file_instead(directory)}")
    if (directory / ADAPTER_FILE).exists():
        raise CheckpointError(f"{directory}: {_adapter(directory)}")
    if not (directory / CONFIG_FILE).exists():
        raise CheckpointError(f"{directory}: has no {CONFIG_FILE}; {_directory_instead(directory)}")


def _nothing_there(directory: Path, written: str) -> str:
    hub = _HUB_ADDRESS.fullmatch(written) or _HUB_NAME.fullmatch(written)
    if hub is not None and not directory.parent.is_dir():  # where there is the first part, it is a path
        owner, name = hub.groups()
        return (
            f"{owner}/{name}: there is no such directory, but it looks like a model on the Hugging Face hub; nothing "
            f"is downloaded here: run `hf download {owner}/{name} --local-dir {name}`, then give --model {name}"
        )
    beside = [path.name for path in directory.parent.glob("*") if path.is_dir()]
    near = difflib.get_close_matches(directory.name, beside, n=1, cutoff=0.7)
    hint = f"did you mean {directory.parent / near[0]}?" if near else f"accepted: {_ACCEPTED}"
    return f"{directory}: there is no such directory; {hint}"


def _file_instead(path: Path) -> str:
    if path.suffix == GGUF:
        return _GGUF
    if path.suffix == ".safetensors":
        return f"a file of weights, one part of a checkpoint; give its directory: --model {path.parent}"
    if path.suffix in OTHER_FORMATS:
        return f"weights as {path.suffix}, which this engine does not open (pickles run code); accepted: {_ACCEPTED}"
    return f"a file; accepted: {_ACCEPTED}"


def _adapter(directory: Path) -> str:
    data = read_json_object(directory / ADAPTER_FILE, max_bytes=MAX_CONFIG_BYTES)
    kind, base = data.get("peft_type") or "LoRA", data.get("base_model_name_or_path") or "another model"
    return (
        f"an adapter ({kind}, {ADAPTER_FILE}) of {base}, not a model; merge it first (peft: merge_and_unload(), then "
        "save_pretrained(DIR)), and give that directory"
    )


def _directory_instead(directory: Path) -> str:
    found = (*directory.glob("snapshots/*/config.json"), *directory.glob("*/config.json"))
    inner = sorted(path.parent for path in found)  # the first: as the hub's cache has them
    if inner:
        several = f" (or another of {len(inner)})" if len(inner) > 1 else ""
        return f"a checkpoint lies further in: --model {inner[0]}{several}"
    if any(directory.glob(f"*{GGUF}")):
        return f"has {min(directory.glob(f'*{GGUF}')).name}: {_GGUF}"
    if (directory / "params.json").exists():
        return "params.json is the layout of Meta's and Mistral's own files; take the model in Hugging Face's layout"
    return f"accepted: {_ACCEPTED}"
