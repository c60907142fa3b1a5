"""Pages made from the code say what it says, on any machine; the page on installing names every licence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pages.__main__ import (
    PAGES,
    ROOT,
    commands_page,
    families_page,
    metrics_page,
    readme,
    settings_page,
    stale_pages,
)
from tests.support.family_table import MODELS

INSTALL_PAGE = ROOT / "worker" / "INSTALL.md"
LICENCES_HEADER = "\n| licence | packages |\n|---|---|\n"
LICENCE_FIELDS = ("License-Expression", "License", "Classifier")


def test_no_page_is_stale() -> None:
    assert list(stale_pages()) == [], "run make pages"


def test_a_page_that_differs_or_is_missing_is_stale(tmp_path: Path) -> None:
    for name in ("README.md", "engine/FAMILIES.md", "settings/SETTINGS.md", "worker/METRICS.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "worker/METRICS.md").write_text("by hand")

    assert set(stale_pages(tmp_path)) == {"worker/METRICS.md", "worker/COMMANDS.md"}


def test_terminal_environment_and_working_directory_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = {name: write() for name, write in PAGES.items()}
    (tmp_path / ".env").write_text("MILLRACE_ENGINE__MAX_NUM_SEQS=3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("MILLRACE_REDIS__URL", "redis://elsewhere/0")

    assert {name: write() for name, write in PAGES.items()} == before


def test_the_settings_page_says_what_is_accepted_and_what_is_derived() -> None:
    text = settings_page()

    assert (
        "| `engine.max_num_seqs`<br>`MILLRACE_ENGINE__MAX_NUM_SEQS` | a whole number, 1 to 65536 (sequences) | `64` |"
        in text
    )
    for key in ("engine.dtype", "engine.num_threads", "engine.kv_cache.num_blocks", "model.name"):
        line = next(line for line in text.splitlines() if line.startswith(f"| `{key}`<br>"))
        assert ", derived |" in line, line
    line = next(line for line in text.splitlines() if line.startswith("| `engine.seed`"))
    assert "derived" not in line
    assert "\n## engine.kv_cache\n\nSize of the block pool." in text


def test_the_metrics_page_has_type_labels_and_buckets() -> None:
    text = metrics_page()

    assert "| `millrace_attempts_total` | counter | `unit`, `attempt` |" in text
    assert "Buckets up to 0.001, " in text
    assert "TOP_TENANTS" not in text


def test_the_commands_page_has_click_s_own_help() -> None:
    text = commands_page()

    assert "\n## millrace submit\n\n`millrace submit [OPTIONS] FILE...`\n" in text
    assert "| `--priority INTEGER RANGE` | 0 runs first. [default: 5; 0<=x<=9] |" in text


def test_the_families_page_and_readme_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "| Gemma 2, `gemma2` | yes | yes |" in families_page()
    assert "| BERT, `bert` | yes | no (1) | yes | yes |" in families_page()
    monkeypatch.setitem(MODELS, "gemma2", "Another Gemma")
    assert "OLMo 3, Another Gemma, Gemma 3" in readme()
    monkeypatch.setitem(MODELS, "new", "New")
    with pytest.raises(LookupError, match="new, loads: neither a test nor a reason"):
        families_page()


@pytest.mark.slow
def test_the_command_says_what_is_stale() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.pages", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "")


def licences() -> dict[str, str]:
    """What the page says: package -> licence."""
    table = INSTALL_PAGE.read_text().split(LICENCES_HEADER)[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {package: licence for licence, packages in rows for package in packages.split(", ")}


def required() -> Iterator[str]:
    """The packages that pyproject.toml names for producers, workers and all that goes with them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for group in (project["dependencies"], *(extras[name] for name in extras if name != "test")):
        yield from (canonicalize_name(Requirement(text).name) for text in group)


def test_every_dependency_is_named() -> None:
    assert set(required()) - licences().keys() == set()


@pytest.mark.parametrize("package", licences())
def test_a_package_states_the_licence_that_the_page_gives(package: str) -> None:
    about = metadata(package)
    texts = [text for field in LICENCE_FIELDS for text in about.get_all(field) or ()]
    stated = " ".join(text for text in texts if "::" not in text or text.startswith("License"))
    for licence in re.split(" and | or ", licences()[package]):
        assert re.search(rf"\b{licence.partition('-')[0]}\b", stated), f"{licence}: {stated}"
