from __future__ import annotations

import stat
from pathlib import Path

import pytest

from worker.acl import UnusablePassword, generate_password, read_password


def test_a_password_is_one_line_without_its_end(tmp_path: Path) -> None:
    for number, end in enumerate((b"", b"\n", b"\r\n")):
        file = tmp_path / str(number)
        file.write_bytes("sixteen ch\u00e4racters".encode() + end)
        assert read_password(file) == "sixteen ch\u00e4racters"


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"fifteen letters", b"two lines\nof text, long", b"\xff" * 20, b"x" * 513, b"a null \0 and more text"],
)
def test_what_is_no_password_is_refused_and_not_shown(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(data)
    with pytest.raises(UnusablePassword, match="accepted: one line") as caught:
        read_password(file)
    assert str(file) in str(caught.value)
    assert "letters" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusablePassword, match="none: No such file"):
        read_password(tmp_path / "none")


def test_a_generated_password_is_long_its_owners_alone_and_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    generate_password(first)
    generate_password(second)

    password = read_password(first)
    generate_password(first)

    assert read_password(first) == password != read_password(second)
    assert len(password) >= 40
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusablePassword, match="none/password: No such file"):
        generate_password(tmp_path / "none" / "password")
