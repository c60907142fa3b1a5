from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.embedding_config import EmbeddingConfig, Pooling
from engine.errors import CheckpointError
from tests.support.tiny_embedders import write_pooling


def _read(path: Path, config: dict[str, Any] | None = None) -> EmbeddingConfig:
    (path / "config.json").write_text(json.dumps(config or {}))
    return EmbeddingConfig.from_directory(path, size=64, default="mean")


@pytest.mark.parametrize("pooling", ["mean", "last_token", "cls"])
def test_sentence_transformers_files_say_what_is_pooled(tmp_path: Path, pooling: Pooling) -> None:
    write_pooling(tmp_path, pooling)
    found = _read(tmp_path)
    assert found.pooling == pooling
    assert found.needs_every_position == (pooling != "last_token")


def test_newer_files_name_the_pooling(tmp_path: Path) -> None:
    write_pooling(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "embedding_dimension": 64}')
    assert _read(tmp_path).pooling == "last_token"


def test_without_files_it_is_the_familys(tmp_path: Path) -> None:
    assert _read(tmp_path).pooling == "mean"


@pytest.mark.parametrize(
    "switches",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": False},
        {"pooling_mode": "weightedmean"},
    ],
)
def test_other_poolings_are_refused(tmp_path: Path, switches: dict[str, object]) -> None:
    write_pooling(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]', "Dense"),
        ('[{"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}]', "a folder of this directory"),
        ('{"0": "Transformer"}', "a list of objects"),
        ("[", "not valid JSON"),
    ],
)
def test_modules_that_cannot_be_run_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("config", "accepted", "refused"),
    [
        ({}, [64], [1, 32, 63, 65]),
        ({"is_matryoshka": False}, [64], [32]),
        ({"is_matryoshka": True}, [1, 32, 64], [0, 65]),
        ({"matryoshka_dimensions": [32, 16]}, [16, 32, 64], [1, 17]),
    ],
)
def test_vectors_may_be_cut_where_the_config_says_so(
    tmp_path: Path, config: dict[str, Any], accepted: list[int], refused: list[int]
) -> None:
    dimensions = _read(tmp_path, config).dimensions
    assert all(length in dimensions for length in accepted)
    assert not any(length in dimensions for length in refused)


def test_longer_vectors_than_the_models_cannot_be_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"matryoshka_dimensions is \[128\]"):
        _read(tmp_path, {"matryoshka_dimensions": [128]})
