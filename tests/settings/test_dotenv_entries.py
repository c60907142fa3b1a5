"""`.env` files: shared with other programs, and never skipped over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import SettingsError, Source, load_settings


def error_of(text: str | bytes) -> str:
    Path(".env").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={})
    return str(caught.value)


def test_comments_quotes_exports_and_a_byte_order_mark_are_understood() -> None:
    Path(".env").write_bytes(
        b"\xef\xbb\xbf# a comment\r\nexport MILLRACE_LOG__LEVEL='debug'\r\n"
        b'MILLRACE_MODEL__NAME="a b" # why\r\nOTHER=${HOME}\r\n'
    )
    effective = load_settings(environ={})

    assert effective.settings.log.level == "debug"
    assert effective.settings.model.name == "a b"
    assert effective.source_of("model.name") is Source.DOTENV


def test_nothing_is_replaced_from_the_environment() -> None:
    # python-dotenv's loader would put HOME's value, or nothing, into a password with ${...} in it.
    Path(".env").write_text("MILLRACE_MODEL__NAME=${HOME}x\n")

    assert load_settings(environ={"HOME": "/root"}).settings.model.name == "${HOME}x"


def test_an_error_names_file_and_line() -> None:
    assert error_of("A=1\n\n# more\nexport MILLRACE_ENGINE__MAX_NUM_SEQ=3\n").startswith(
        ".env:4: MILLRACE_ENGINE__MAX_NUM_SEQ=3: no such setting; did you mean MILLRACE_ENGINE__MAX_NUM_SEQS?"
    )


def test_a_line_of_ours_that_cannot_be_read_is_not_skipped() -> None:
    assert error_of("\nMILLRACE_LOG__LEVEL info\n") == ".env:2: this line cannot be read; accepted: NAME=value"


def test_a_line_of_others_that_cannot_be_read_is_theirs() -> None:
    Path(".env").write_text('THEIRS yes\nALSO="unclosed\nMILLRACE_LOG__LEVEL=error\n')

    assert load_settings(environ={}).settings.log.level == "error"


def test_a_name_without_a_value_is_refused() -> None:
    assert error_of("MILLRACE_LOG__LEVEL\n") == ".env:1: MILLRACE_LOG__LEVEL: no value; accepted: NAME=value"


def test_a_name_set_twice_is_refused() -> None:
    # In the seed the last one won.
    assert error_of("MILLRACE_LOG__LEVEL=info\nX=1\nMILLRACE_LOG__LEVEL=debug\n") == (
        ".env:3: MILLRACE_LOG__LEVEL: set twice; the first time on line 1"
    )


def test_a_file_that_is_not_utf_8_is_refused() -> None:
    assert error_of(b"A=1\nMILLRACE_MODEL__NAME=\xff\n") == ".env: not UTF-8 at byte 25"


def test_a_file_that_was_asked_for_must_exist() -> None:
    with pytest.raises(SettingsError, match=r"^nowhere\.env: cannot be read: No such file or directory$"):
        load_settings(environ={}, dotenv_path=Path("nowhere.env"))


def test_a_file_that_was_asked_for_replaces_the_one_in_the_working_directory() -> None:
    Path(".env").write_text("MILLRACE_LOG__LEVEL=debug\n")
    Path("other.env").write_text("MILLRACE_LOG__FORMAT=json\n")
    log = load_settings(environ={}, dotenv_path=Path("other.env")).settings.log

    assert (log.level, log.format) == ("info", "json")
