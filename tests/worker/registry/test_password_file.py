from __future__ import annotations

from pathlib import Path

import pytest

from worker.registry.connect import MAX_PASSWORD_BYTES, read_password_line


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_line_comes_without_its_end(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "password").write_bytes("h\u00e4 ".encode() + end)
    assert read_password_line(tmp_path / "password") == "h\u00e4 "


@pytest.mark.parametrize("data", [b"", b"\n", b"two\nlines", b"a line\n\n", b"null\0", b"x" * (MAX_PASSWORD_BYTES + 1)])
def test_what_is_not_one_line_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "password").write_bytes(data)
    assert read_password_line(tmp_path / "password") is None


def test_what_is_not_utf_8_is_refused_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"hunter2\xff")
    with pytest.raises(ValueError, match=r"^not UTF-8$") as caught:
        read_password_line(tmp_path / "password")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_file_at_its_limit_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("x" * MAX_PASSWORD_BYTES)
    assert read_password_line(tmp_path / "password") == "x" * MAX_PASSWORD_BYTES
