from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.checkpoint.model_config import read_generation_config
from engine.errors import CheckpointError


def write(path: Path, *, generation: object = None, model: object = None) -> None:
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "config.json").write_text(json.dumps({} if model is None else model))


@pytest.mark.parametrize(("value", "expected"), [(7, {7}), (0, {0}), ([7, 9], {7, 9}), ([], set())])
def test_ids_may_be_one_or_a_list(tmp_path: Path, value: object, expected: set[int]) -> None:
    write(tmp_path, generation={"eos_token_id": value}, model={"eos_token_id": 1})
    assert read_generation_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}])
def test_the_model_configuration_stands_in(tmp_path: Path, generation: object) -> None:
    write(tmp_path, generation=generation, model={"eos_token_id": [1, 2]})
    assert read_generation_config(tmp_path).eos_token_ids == {1, 2}


def test_no_id_anywhere_is_none(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_generation_config(tmp_path).eos_token_ids == frozenset()


@pytest.mark.parametrize("value", ["</s>", -1, [1, "2"], True, [True], 1.0])
def test_what_is_no_id_is_refused(tmp_path: Path, value: object) -> None:
    write(tmp_path, generation={"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is"):
        read_generation_config(tmp_path)
