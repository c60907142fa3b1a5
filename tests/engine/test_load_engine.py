"""The one door from settings to an engine, whichever kind of model there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.encoder import EncoderEngine
from engine.engine import Engine
from engine.errors import NonFiniteLogits
from engine.loading.load import load_engine
from settings import EffectiveSettings, SettingsError, load_settings
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.tiny_embedders import make_bert_checkpoint

KINDS: list[tuple[Callable[[Path], Path], type, str]] = [
    (make_checkpoint, Engine, "model.embed_tokens.weight"),
    (make_bert_checkpoint, EncoderEngine, "embeddings.word_embeddings.weight"),
]


def _settings(**model: object) -> EffectiveSettings:
    values = {f"model.{key}": str(value) for key, value in model.items()}
    values |= {"engine.device": "cpu", "engine.num_threads": "1", "engine.kv_cache.num_blocks": "32"}
    return load_settings(values, environ={}, dotenv_path=Path(os.devnull))


@pytest.mark.parametrize(("make", "kind", "words"), KINDS)
def test_a_model_whose_first_token_is_not_finite_is_not_handed_out(
    tmp_path: Path, make: Callable[[Path], Path], kind: type, words: str
) -> None:
    path = make(tmp_path)
    assert isinstance(load_engine(_settings(path=path)), kind)
    tensors = load_file(path / "model.safetensors")
    tensors[words][0] = torch.nan  # of the warm-up token
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteLogits):
        load_engine(_settings(path=path))


@pytest.mark.parametrize(("make", "kind", "words"), KINDS)
def test_the_models_configuration_is_derived_from_once(
    tmp_path: Path, make: Callable[[Path], Path], kind: type, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path)
    read, seen = Path.read_text, []

    def read_and_count(self: Path, encoding: str | None = None, errors: str | None = None) -> str:
        seen.append(self.relative_to(path).as_posix() if self.is_relative_to(path) else "")
        return read(self, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_and_count)
    load_engine(_settings(path=path))
    assert seen.count("config.json") == 2  # what the model is, and how its vectors may be cut


def test_a_path_out_of_the_root_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(SettingsError, match=r"model\.path"):
        load_engine(_settings(path=make_checkpoint(tmp_path / "elsewhere"), root=tmp_path / "root"))
