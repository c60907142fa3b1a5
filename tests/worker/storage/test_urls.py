"""What URLs of objects name, and that patterns of keys find what the shell's find of files."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from worker.storage.urls import KeyPattern, StorageError, file_path, is_url, object_url

KEYS = (
    "a.jsonl", "b.jsonl", ".hidden.jsonl", "in/a.jsonl", "in/[1].jsonl", "in/1.jsonl", "in/.c.jsonl", "in/deep/a.jsonl",
    "in/deep/er/x.jsonl.gz", "in/.secret/a.jsonl", "logs/2026-01/day-1.jsonl", "logs/2026-02/day-1.jsonl",
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        "*.jsonl", "in/*", "in/*.jsonl", "in/?.jsonl", "in/[a-z].jsonl", "in/[!a].jsonl", "in/[[]1].jsonl", "*/a.jsonl",
        "**/a.jsonl", "**/*.jsonl", "in/**", "in/**/*.gz", "logs/2026-*/day-[12].jsonl", "in/.*.jsonl", "in/.secret/*",
        "none-*", "**",
    ],
)  # fmt: skip
def test_a_pattern_finds_what_the_shells_finds(tmp_path: Path, pattern: str) -> None:
    for key in KEYS:
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    wanted = {name for name in found if os.path.isfile(tmp_path / name)}
    asked = KeyPattern.of(pattern)

    matching = {key for key in KEYS if asked.matches(key)}

    assert matching == wanted
    assert all(key.startswith(asked.folder) for key in matching)
    assert asked.is_deep or not any("/" in key.removeprefix(asked.folder) for key in matching)


def test_the_longest_folder_before_a_wildcard_is_listed() -> None:
    assert KeyPattern.of("logs/2026-01/day-*.jsonl").folder == "logs/2026-01/"
    assert KeyPattern.of("logs/2026-*/day-1.jsonl").folder == "logs/"
    assert KeyPattern.of("day-*.jsonl").folder == ""


def test_a_key_stands_as_it_is_and_a_signature_is_not_shown() -> None:
    url = object_url("S3://bucket/in/a b%41?#[1].jsonl")

    assert (url.scheme, url.bucket, url.key) == ("s3", "bucket", "in/a b%41?#[1].jsonl")
    assert url.name == "s3://bucket/in/a b%41?#[1].jsonl"
    assert object_url("https://host:8000/a/b.jsonl?X-Amz-Signature=abc").name == "https://host:8000/a/b.jsonl?..."
    assert object_url("gs://bucket/").is_folder
    assert not object_url("https://host/a*").is_pattern


@pytest.mark.parametrize(
    "name", ["s3://", "s3:///key", "s3://user:hidden@bucket/key", "https:///path", "https://host:hidden/", "x://a/b"]
)
def test_what_names_no_object_is_refused_without_its_secrets(name: str) -> None:
    with pytest.raises(StorageError, match="accepted: ") as refused:
        object_url(name)

    assert "user:hidden" not in str(refused.value)


def test_names_of_files_are_no_urls() -> None:
    assert not any(map(is_url, ("-", "a.jsonl", "./s3://b/k", "/a/b", "c:/x", "a b://c")))
    assert file_path("file:///a%20b/c") == "/a b/c"
    assert file_path("file://localhost/c") == "/c"
    assert file_path("s3://b/k") is None
