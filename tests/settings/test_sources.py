"""How `.env` files and TOML profiles are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import SettingsError, Source, load_settings
from settings.catalogue import Catalogue

pytestmark = pytest.mark.usefixtures("bare_environment")

NUM_ENGINE = sum(key.startswith("engine.") for key in Catalogue.read().specs)


def dotenv_error(text: str | bytes) -> str:
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
    assert dotenv_error("A=1\n\n# more\nexport MILLRACE_ENGINE__MAX_NUM_SEQ=3\n").startswith(
        ".env:4: MILLRACE_ENGINE__MAX_NUM_SEQ=3: no such setting; did you mean MILLRACE_ENGINE__MAX_NUM_SEQS?"
    )


def test_a_line_of_ours_that_cannot_be_read_is_not_skipped() -> None:
    assert dotenv_error("\nMILLRACE_LOG__LEVEL info\n") == ".env:2: this line cannot be read; accepted: NAME=value"


def test_a_line_of_others_that_cannot_be_read_is_theirs() -> None:
    Path(".env").write_text('THEIRS yes\nALSO="unclosed\nMILLRACE_LOG__LEVEL=error\n')

    assert load_settings(environ={}).settings.log.level == "error"


def test_a_name_without_a_value_is_refused() -> None:
    assert dotenv_error("MILLRACE_LOG__LEVEL\n") == ".env:1: MILLRACE_LOG__LEVEL: no value; accepted: NAME=value"


def test_a_name_set_twice_is_refused() -> None:
    # In the seed the last one won.
    assert dotenv_error("MILLRACE_LOG__LEVEL=info\nX=1\nMILLRACE_LOG__LEVEL=debug\n") == (
        ".env:3: MILLRACE_LOG__LEVEL: set twice; the first time on line 1"
    )


def test_a_file_that_is_not_utf_8_is_refused() -> None:
    assert dotenv_error(b"A=1\nMILLRACE_MODEL__NAME=\xff\n") == ".env: not UTF-8 at byte 25"


def test_a_file_that_was_asked_for_must_exist() -> None:
    with pytest.raises(SettingsError, match=r"^nowhere\.env: cannot be read: No such file or directory$"):
        load_settings(environ={}, dotenv_path=Path("nowhere.env"))


def test_a_given_file_replaces_the_one_in_the_working_directory() -> None:
    Path(".env").write_text("MILLRACE_LOG__LEVEL=debug\n")
    Path("other.env").write_text("MILLRACE_LOG__FORMAT=json\n")
    log = load_settings(environ={}, dotenv_path=Path("other.env")).settings.log

    assert (log.level, log.format) == ("info", "json")


def profile_error(text: str) -> str:
    Path("p.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={}, profile_path=Path("p.toml"))
    return str(caught.value)


def test_tables_dotted_keys_and_inline_tables_mean_the_same() -> None:
    Path("p.toml").write_text(
        "engine.max_num_seqs = 8\n"
        "log = {level = 'debug'}\n"
        "[engine.kv_cache]\nblock_size = 32\n"
        "[engine.profile]\nlayers = true\nmax_tokens = 128\n"
    )
    effective = load_settings(environ={}, profile_path=Path("p.toml"))

    engine = effective.settings.engine
    assert (engine.max_num_seqs, engine.kv_cache.block_size, engine.profile.max_tokens) == (8, 32, 128)
    assert engine.profile.layers is True
    assert effective.settings.log.level == "debug"
    assert effective.source_of("engine.kv_cache.block_size") is Source.PROFILE


def test_text_follows_the_one_grammar() -> None:
    Path("p.toml").write_text(
        "[engine]\nmax_num_seqs = '8'\nmax_model_len = 'none'\ngreedy_argmax = 'off'\ntrace_steps = 1\n"
        "[worker]\nlease_s = 60\n[model]\npath = 'a/b'\n"
    )
    settings = load_settings(environ={}, profile_path=Path("p.toml")).settings

    assert (settings.engine.max_num_seqs, settings.engine.max_model_len) == (8, None)
    assert (settings.engine.greedy_argmax, settings.engine.trace_steps) == (False, True)
    assert settings.worker.lease_s == 60.0
    assert settings.model.path == Path("a/b")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("[engine]\nmax_num_seqs = 'lots'", "p.toml: engine.max_num_seqs=lots: accepted: a whole number, 1 to 65536"),
        ("[engine]\nmax_num_seqs = true", "p.toml: engine.max_num_seqs=true: accepted: a whole number"),
        ("[engine]\nmax_num_seqs = 8.0", "p.toml: engine.max_num_seqs=8: accepted: a whole number"),
        ("[engine.max_num_seqs]\nx = 1", "p.toml: engine.max_num_seqs="),
        ("[worker]\nlease_s = nan", "p.toml: worker.lease_s=nan: accepted: a number"),
        (
            "[engine]\nmax_num_seq = 8",
            "p.toml: engine.max_num_seq=8: no such setting; did you mean engine.max_num_seqs?",
        ),
        ("[enginee]\nseed = 8", "p.toml: enginee.seed=8: no such setting; did you mean engine.seed?"),
        ("[enginee]", "p.toml: enginee="),
        ("engine = 3", f"p.toml: engine=3: a group of {NUM_ENGINE} settings, not one; set for instance engine.device"),
        ("'engine.seed' = 3", 'p.toml: "engine.seed"=3: no such setting; did you mean engine.seed?'),
        ("[engine]\n'MAX_NUM_SEQS' = 3", "p.toml: engine.MAX_NUM_SEQS=3: no such setting; did you mean engine.max_num"),
        ("[engine", "p.toml: not TOML: "),
        ("[log]\nlevel = 'info'\nlevel = 'debug'", "p.toml: not TOML: "),
    ],
)
def test_a_fault_is_named_with_file_and_key(text: str, start: str) -> None:
    message = profile_error(text)

    assert message.startswith(start)
    assert message.isprintable()


def test_an_empty_profile_and_an_empty_table_change_nothing() -> None:
    Path("p.toml").write_text("[engine]\n[log]\n")
    effective = load_settings(environ={}, profile_path=Path("p.toml"))

    assert {row.source for row in effective.rows()} == {Source.DEFAULT}


def test_a_missing_profile_is_named_with_the_variable_that_asked_for_it() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={"MILLRACE_PROFILE": "gone.toml"})

    assert str(caught.value) == "MILLRACE_PROFILE: gone.toml: cannot be read: No such file or directory"


def test_a_missing_profile_that_was_given_as_an_argument_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^gone\.toml: cannot be read: No such file or directory$"):
        load_settings(environ={}, profile_path=Path("gone.toml"))


def test_an_empty_profile_variable_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^MILLRACE_PROFILE='': accepted: the path of a TOML file$"):
        load_settings(environ={"MILLRACE_PROFILE": ""})
