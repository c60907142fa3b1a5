"""The page on installing names every dependency, with the licence that the package's own metadata states."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pages.__main__ import ROOT

PAGE = ROOT / "worker" / "INSTALL.md"
HEADER = "\n| licence | packages |\n|---|---|\n"
FIELDS = ("License-Expression", "License", "Classifier")


def licences() -> dict[str, str]:
    """What the page says: package -> licence."""
    table = PAGE.read_text().split(HEADER)[1].split("\n\n")[0]
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
    texts = [text for field in FIELDS for text in about.get_all(field) or ()]
    stated = " ".join(text for text in texts if "::" not in text or text.startswith("License"))
    for licence in re.split(" and | or ", licences()[package]):
        assert re.search(rf"\b{licence.partition('-')[0]}\b", stated), f"{licence}: {stated}"
