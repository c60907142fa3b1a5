from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.files import check_files_are_under_root, model_directory
from engine.errors import CheckpointError
from engine.loading.derived_settings import derive_settings
from settings import ModelSettings, SettingsError, load_settings
from tests.support.decoder_config import decoder_config
from tests.support.tiny_checkpoint import make_checkpoint


def under(root: Path, path: str | Path) -> Path:
    return model_directory(ModelSettings(root=root, path=Path(path)))


def test_without_a_root_a_path_is_taken_as_it_is() -> None:
    assert model_directory(ModelSettings(path=Path("some/../model"))) == Path("some/../model")


def test_a_relative_path_is_taken_under_the_root_and_an_absolute_one_must_be_there(tmp_path: Path) -> None:
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
def test_a_file_that_leads_out_of_the_root_is_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
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
