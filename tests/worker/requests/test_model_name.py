from __future__ import annotations

from pathlib import Path

import pytest

from settings import ModelSettings, SettingsError
from worker.requests.served_model import served_model_name


def test_a_model_is_called_what_the_settings_say_else_what_its_directory_is_called(tmp_path: Path) -> None:
    assert served_model_name(ModelSettings(name="good", path=Path("/models/tiny"))) == "good"
    assert served_model_name(ModelSettings(path=tmp_path / "x" / ".." / "tiny")) == "tiny"
    assert served_model_name(ModelSettings(root=tmp_path, path=Path("tiny"))) == "tiny"
    assert served_model_name(ModelSettings()) == "millrace"


def test_a_directory_outside_of_the_root_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.path"):
        served_model_name(ModelSettings(root=tmp_path, path=Path("/etc")))
