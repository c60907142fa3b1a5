"""Which files make a checkpoint, and how its tensors and the ids that end a text are read."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.files import (
    SAMPLED_BLOCKS,
    WHOLE_BYTES,
    check_files_are_under_root,
    fingerprint,
    model_directory,
)
from engine.checkpoint.model_config import read_eos_token_ids
from engine.checkpoint.weights import Checkpoint
from engine.errors import CheckpointError
from engine.loading.derived_settings import derive_settings
from settings import ModelSettings, SettingsError, load_settings
from tests.support.processes import resident_file_bytes
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint, make_model

INDEX = "model.safetensors.index.json"

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B = {"a": torch.ones(2)}, {"b": torch.ones(2)}


def save_shards(path: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], index: Mapping[str, str]) -> None:
    for file_name, tensors in shards.items():
        save_file(dict(tensors), path / file_name)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def save_raw(path: Path, header: Mapping[str, object], data: bytes) -> None:
    """A safetensors file whose header is not padded."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
def test_every_tensor_is_read_as_it_was_saved(tmp_path: Path, max_shard_size: str) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "60KB")
    expected = make_model("qwen3", dtype="bfloat16").state_dict()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names() == expected.keys()
        for name, tensor in expected.items():
            assert checkpoint.shape(name) == tuple(tensor.shape)
            assert checkpoint.dtype(name) == torch.bfloat16
            assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_tensors_are_mapped_not_copied(tmp_path: Path) -> None:
    save_file({"big": torch.ones(48 << 20, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")  # 96 MiB
    program = """
import re, sys
from pathlib import Path
from engine.checkpoint.weights import Checkpoint

def anonymous_kib() -> int:
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

with Checkpoint.open(Path(sys.argv[1])) as checkpoint:
    checkpoint.read("big").float()[:1].sum()
before = anonymous_kib()
with Checkpoint.open(Path(sys.argv[1])) as checkpoint:
    tensor = checkpoint.read("big")
total = sum(int(part.sum()) for part in tensor.view(48, -1))
print(total, anonymous_kib() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    total, grown_kib = (int(word) for word in done.stdout.split())
    assert total == 48 << 20
    assert grown_kib < 16 << 10


def test_tensors_outlive_the_checkpoint_and_writes_never_reach_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(1000.0)}, file)
    before = file.read_bytes()
    with Checkpoint.open(tmp_path) as checkpoint:
        tensor = checkpoint.read("a")
    tensor += 1
    assert torch.equal(tensor, torch.arange(1000.0) + 1)
    assert file.read_bytes() == before


def test_released_pages_leave_the_process_and_are_read_again(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4 << 20), "b": torch.arange(1000.0)}, tmp_path / "model.safetensors")  # 16 MiB
    with Checkpoint.open(tmp_path) as checkpoint:
        tensor = checkpoint.read("a")
        assert tensor.sum() == 4 << 20
        assert resident_file_bytes(tmp_path) > 16 << 20
        checkpoint.release()
        assert resident_file_bytes(tmp_path) == 0
        assert torch.equal(checkpoint.read("b"), torch.arange(1000.0))
        assert tensor[-1] == 1
    checkpoint.release()  # a closed one has nothing to give back


def test_an_empty_tensor_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "none": torch.ones(0, 3)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.read("none").shape == (0, 3)


def test_a_closed_checkpoint_reads_no_more(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="tensor a cannot be read"):
        checkpoint.read("a")


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        for method in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
            with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
                method("lm_head.weight")


def test_tensors_at_odd_addresses_are_read(tmp_path: Path) -> None:
    values = torch.arange(4.0)
    for padding in range(4):
        header = {"a" * (padding + 1): {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
        save_raw(tmp_path / "model.safetensors", header, values.numpy().tobytes())
        with Checkpoint.open(tmp_path) as checkpoint:
            tensor = checkpoint.read("a" * (padding + 1))
        assert torch.equal(tensor, values)
        assert tensor.data_ptr() % 4 == 0


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "I8", "U8", "BOOL"])
def test_other_dtypes_are_refused_with_the_tensor_named_once_it_is_taken(tmp_path: Path, dtype: str) -> None:
    header = {"layer.weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, 16 if dtype == "F64" else 2]}}
    save_raw(tmp_path / "model.safetensors", header, b"\0" * (16 if dtype == "F64" else 2))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.shape("layer.weight") == (2,)
        for method in (checkpoint.read, checkpoint.dtype):
            with pytest.raises(
                CheckpointError, match=f"tensor layer.weight has dtype {dtype}; accepted: F32, BF16, F16"
            ):
                method("layer.weight")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "0 bytes long"),
        (b"\0" * 100, "not a valid safetensors file"),
        (struct.pack("<Q", (32 << 20) + 1) + b"{}", "header of 33554433 bytes; accepted: at most 33554432"),
        (struct.pack("<Q", 1 << 63) + b"{}", "header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 50) + b"{}", "not a valid safetensors file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "consolidated.00.pth"])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=re.escape(f"has {name} only")):
        Checkpoint.open(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no weights; accepted: model.safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        Checkpoint.open(tmp_path / "nothing")


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        Checkpoint.open(tmp_path)


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    blob, snapshot = tmp_path / "blob", tmp_path / "snapshot"
    snapshot.mkdir()
    save_file({"a": torch.ones(2)}, blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    with Checkpoint.open(snapshot) as checkpoint:
        assert torch.equal(checkpoint.read("a"), torch.ones(2))


@pytest.mark.parametrize(
    ("shards", "index", "named"),
    [
        ({ONE: A, TWO: A | B}, {"a": ONE, "b": TWO}, f"tensor a is in {ONE} and {TWO}"),
        ({ONE: A, TWO: B}, {"a": ONE, "b": TWO, "c": TWO}, f"tensor c is not in {TWO}, where the index puts it"),
        ({ONE: A, TWO: B}, {"a": TWO, "b": ONE}, f"tensor a is not in {TWO}, where the index puts it, but in {ONE}"),
        ({ONE: A | B}, {"a": ONE}, f"tensor b is in {ONE} but not in the index"),
        ({ONE: A}, {"a": ONE, "b": TWO}, f"names {TWO}, which is not there"),
        ({}, {}, "weight_map is missing or empty"),
        ({}, {"a": "../secret.safetensors"}, "weight_map puts tensor a into '../secret.safetensors'"),
        ({}, {"a": "/etc/passwd"}, "weight_map puts tensor a into '/etc/passwd'"),
        ({}, {"a": 3}, "weight_map puts tensor a into 3"),
        ({}, {"a": "pytorch_model.bin"}, "weight_map names 'pytorch_model.bin'"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], index: Mapping[str, str], named: str
) -> None:
    save_shards(tmp_path, shards, index)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        Checkpoint.open(tmp_path)


def test_one_file_and_an_index_together_are_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, {ONE: A}, {"a": ONE})
    save_file(A, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has both"):
        Checkpoint.open(tmp_path)


def under(root: Path, path: str | Path) -> Path:
    return model_directory(ModelSettings(root=root, path=Path(path)))


def test_without_a_root_a_path_is_taken_as_it_is() -> None:
    assert model_directory(ModelSettings(path=Path("some/../model"))) == Path("some/../model")


def test_a_relative_path_lies_under_the_root_and_an_absolute_one_must_too(tmp_path: Path) -> None:
    assert under(tmp_path, "qwen3") == under(tmp_path, tmp_path / "qwen3") == tmp_path / "qwen3"


@pytest.mark.parametrize("path", ["..", "../outside", "a/../../outside", "/etc", "link", "link/deeper"])
def test_a_path_that_leads_out_of_the_root_is_refused(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "root-beside").mkdir()
    (root / "link").symlink_to(tmp_path / "root-beside")
    with pytest.raises(SettingsError, match=r"^model\.path=.*accepted: a directory under .*/root$") as caught:
        under(root, path)
    assert caught.value.value == path


def test_a_root_that_is_a_link_itself_is_followed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "models")
    assert under(tmp_path / "link", "qwen3") == tmp_path / "models" / "qwen3"


def test_no_path_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"set model\.path"):
        model_directory(ModelSettings(root=tmp_path))


def test_links_within_the_root_are_as_good_as_files(tmp_path: Path) -> None:
    """As in Hugging Face's cache: snapshots/REVISION/NAME -> ../../blobs/HASH."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    make_checkpoint(blobs, "qwen3")
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    effective = load_settings({"model.root": str(tmp_path), "model.path": "snapshots/1"}, environ={})
    assert derive_settings(effective).settings.model.name == "1"
    assert decoder_config(snapshot).architecture == "qwen3"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates"])
def test_a_file_that_leads_out_of_the_root_is_refused_unread(tmp_path: Path, name: str) -> None:
    model = tmp_path / "root" / "model"
    make_checkpoint(model, "qwen3")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "elsewhere")
    effective = load_settings({"model.root": str(tmp_path / "root"), "model.path": "model"}, environ={})
    with pytest.raises(CheckpointError, match=rf"{name}: leads to .*/elsewhere; accepted: a file under model\.root"):
        derive_settings(effective)


def test_a_template_in_a_folder_is_checked_too(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "model" / "additional_chat_templates"
    folder.mkdir(parents=True)
    (folder / "rag.jinja").symlink_to("/etc/hostname")
    model = ModelSettings(root=tmp_path / "root", path=Path("model"))
    with pytest.raises(CheckpointError, match=r"rag\.jinja: leads to /etc/hostname"):
        check_files_are_under_root(model_directory(model), model)


def write(path: Path, *, generation: object = None, model: object = None) -> None:
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "config.json").write_text(json.dumps({} if model is None else model))


@pytest.mark.parametrize(("value", "expected"), [(7, {7}), (0, {0}), ([7, 9], {7, 9}), ([], set())])
def test_ids_may_be_one_or_a_list(tmp_path: Path, value: object, expected: set[int]) -> None:
    write(tmp_path, generation={"eos_token_id": value}, model={"eos_token_id": 1})
    assert read_eos_token_ids(tmp_path, 10) == expected


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}])
def test_the_model_configuration_stands_in(tmp_path: Path, generation: object) -> None:
    write(tmp_path, generation=generation, model={"eos_token_id": [1, 2]})
    assert read_eos_token_ids(tmp_path, 10) == {1, 2}


def test_no_id_anywhere_is_none(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_eos_token_ids(tmp_path, 10) == frozenset()


@pytest.mark.parametrize("value", ["</s>", -1, [1, "2"], True, [True], 1.0])
def test_what_is_no_id_is_refused(tmp_path: Path, value: object) -> None:
    write(tmp_path, generation={"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is"):
        read_eos_token_ids(tmp_path, 10)


def checkpoint_at(path: Path) -> ModelSettings:
    path.mkdir()
    write(path, generation={}, model={"model_type": "llama"})
    save_file(A, path / "model.safetensors")
    return ModelSettings(path=path)


def test_a_copy_of_a_checkpoint_has_its_fingerprint(tmp_path: Path) -> None:
    first, second = checkpoint_at(tmp_path / "a"), checkpoint_at(tmp_path / "b")
    for name in ("README.md", "eval_results.json", "notes.txt"):
        (tmp_path / "b" / name).write_text("of nothing that is loaded")
    os.mkfifo(tmp_path / "b" / "chat_template.jinja")
    (tmp_path / "b" / "old.safetensors").symlink_to("nowhere")
    assert fingerprint(first) == fingerprint(second)
    assert re.fullmatch("[0-9a-f]{32}", fingerprint(first))
    assert fingerprint(ModelSettings()) == ""


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json"),
        "additional_chat_templates/rag.jinja",
    ],
)
def test_a_file_that_answers_depend_on_changes_the_fingerprint(tmp_path: Path, name: str) -> None:
    model = checkpoint_at(tmp_path / "a")
    before = fingerprint(model)
    (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "a" / name).write_text("{}")
    assert fingerprint(model) != before


def test_other_weights_of_the_same_shape_change_the_fingerprint(tmp_path: Path) -> None:
    model = checkpoint_at(tmp_path / "a")
    before = fingerprint(model)
    save_file({"a": torch.zeros(2)}, tmp_path / "a" / "model.safetensors")
    assert fingerprint(model) != before


def test_of_a_large_file_a_changed_matrix_is_seen_wherever_it_lies(tmp_path: Path) -> None:
    model, size = checkpoint_at(tmp_path / "a"), WHOLE_BYTES + 1
    weights = tmp_path / "a" / "model.safetensors"
    found = set()
    for start in (0, size // 3, size - 2 * size // SAMPLED_BLOCKS):  # each a little longer than two samples are apart
        with weights.open("wb") as stream:
            stream.truncate(size)
            stream.seek(start)
            stream.write(b"x" * (2 * size // SAMPLED_BLOCKS))
        found.add(fingerprint(model))
    assert len(found) == 3


def test_a_file_outside_of_the_root_is_not_read_for_the_fingerprint(tmp_path: Path) -> None:
    checkpoint_at(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: leads to /dev/zero"):
        fingerprint(ModelSettings(root=tmp_path, path=Path("a")))


def test_a_file_that_cannot_be_read_has_no_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint_at(tmp_path / "a")

    def refuse(*_: object) -> IO[bytes]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"Permission denied; accepted: a file that can be read"):
        fingerprint(model)
