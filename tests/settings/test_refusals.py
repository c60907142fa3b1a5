"""Names that nobody knows and settings that contradict each other stop the program."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from settings import EngineSettings, SettingsError, load_settings, parse_assignments

pytestmark = pytest.mark.usefixtures("bare_environment")


def error_of(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ=environ)
    return str(caught.value)


def test_a_mistyped_variable_is_named_with_its_value_and_its_neighbour() -> None:
    assert error_of({"MILLRACE_ENGINE__MAX_NUM_SEQ": "3"}) == (
        "MILLRACE_ENGINE__MAX_NUM_SEQ=3: no such setting; did you mean MILLRACE_ENGINE__MAX_NUM_SEQS? "
        "accepted: a whole number, 1 to 65536"
    )


def test_a_bad_value_is_named_with_its_variable_and_the_accepted_forms() -> None:
    assert error_of({"MILLRACE_ENGINE__MAX_NUM_SEQS": "lots"}) == (
        "MILLRACE_ENGINE__MAX_NUM_SEQS=lots: accepted: a whole number, 1 to 65536"
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("MILLRACE_ENGINE_MAX_NUM_SEQS", "MILLRACE_ENGINE__MAX_NUM_SEQS"),
        ("MILLRACE_BLOCK_SIZE", "MILLRACE_ENGINE__KV_CACHE__BLOCK_SIZE"),
        ("MILLRACE_ENGINE__BLOCK_SIZE", "MILLRACE_ENGINE__KV_CACHE__BLOCK_SIZE"),
        ("millrace_log__level", "MILLRACE_LOG__LEVEL"),
        ("MILLRACE_Log__Level", "MILLRACE_LOG__LEVEL"),
        ("MILLRACE_PROFIL", "MILLRACE_PROFILE"),
        ("MILLRACE_REDIS__URI", "MILLRACE_REDIS__URL"),
    ],
)
def test_the_error_guesses_what_was_meant(written: str, meant: str) -> None:
    assert f"did you mean {meant}? accepted: " in error_of({written: "1"})


def test_a_name_like_no_other_is_likened_to_none() -> None:
    message = error_of({"MILLRACE_ZZZZ": "1"})

    assert message == "MILLRACE_ZZZZ=1: no such setting; `millrace config` lists all"


def test_variables_of_others_are_left_alone() -> None:
    load_settings(environ={"MILL": "1", "MILLRACER_X": "1", "FERRUM_PREFIX_CACHE": "1", "PATH": "/bin"})


def test_a_group_is_not_a_setting() -> None:
    # pydantic-settings would read this as JSON and let it override single variables.
    message = error_of({"MILLRACE_LOG": '{"level": "debug"}'})

    assert message == (
        'MILLRACE_LOG=\'{"level": "debug"}\': a group of 2 settings, not one; set for instance MILLRACE_LOG__LEVEL'
    )


@pytest.mark.parametrize("name", ["MILLRACE_PORT", "MILLRACE_SERVICE_HOST", "MILLRACE_REDIS_PORT_6379_TCP_ADDR"])
def test_a_kubernetes_service_link_is_recognised(name: str) -> None:
    assert "enableServiceLinks" in error_of({name: "10.0.0.1"})


@pytest.mark.parametrize("name", ["MILLRACE_X\nY", "MILLRACE_X\u2028", "MILLRACE_\x1b[31m", "MILLRACE_\udcff"])
@pytest.mark.parametrize("value", ["a\nb", "\r", "\x1b]0;x", "\udc80", "x" * 10_000])
def test_an_error_is_one_printable_line_of_bounded_length(name: str, value: str) -> None:
    message = error_of({name: value})

    assert message.isprintable()
    assert len(message) < 600


def test_an_override_is_named_as_an_option() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"engine.max_num_seq": "lots"}, environ={})

    assert str(caught.value) == (
        "--set engine.max_num_seq=lots: no such setting; did you mean --set engine.max_num_seqs? "
        "accepted: a whole number, 1 to 65536"
    )


def test_an_error_carries_its_parts() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"engine.device": "tpu"}, environ={})

    assert caught.value.name == "--set engine.device"
    assert caught.value.value == "tpu"
    assert caught.value.accepted == "auto, cpu or cuda"


def test_assignments_split_at_the_first_equals_sign_and_the_last_counts() -> None:
    texts = ["redis.url=redis://h/0?a=b", "engine.seed=1", "engine.seed=2"]

    assert parse_assignments(texts) == {"redis.url": "redis://h/0?a=b", "engine.seed": "2"}


@pytest.mark.parametrize("text", ["engine.seed", "", "=3"])
def test_an_option_that_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="accepted: key=value, such as"):
        parse_assignments([text])


def test_a_path_keeps_its_letter_case_and_its_spaces() -> None:
    effective = load_settings({"model.path": "/My Models/None"}, environ={})

    assert effective.settings.model.path == Path("/My Models/None")


def test_a_step_must_have_a_token_for_every_running_request() -> None:
    assert error_of({"MILLRACE_ENGINE__MAX_NUM_BATCHED_TOKENS": "32"}) == (
        "MILLRACE_ENGINE__MAX_NUM_BATCHED_TOKENS=32: accepted: at least engine.max_num_seqs, which is 64 (default)"
    )
    assert error_of({"MILLRACE_ENGINE__MAX_NUM_SEQS": "4096"}) == (
        "MILLRACE_ENGINE__MAX_NUM_SEQS=4096: accepted: at most engine.max_num_batched_tokens, which is 2048 (default)"
    )


def test_the_stronger_source_is_blamed_and_the_other_is_named() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"engine.max_num_batched_tokens": "32"}, environ={"MILLRACE_ENGINE__MAX_NUM_SEQS": "100"})

    assert str(caught.value) == (
        "--set engine.max_num_batched_tokens=32: accepted: at least engine.max_num_seqs, which is 100 (environment)"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKER__LEASE_S", "9"),
        ("WORKER__RENEW_INTERVAL_S", "16"),
        ("LIMITS__MAX_OPEN_PROMPTS", "1000"),
        ("LIMITS__MAX_PROMPTS_PER_JOB", "1000001"),
        ("LIMITS__MAX_JOB_BYTES", "1000"),
    ],
)
def test_other_contradictions_are_refused_too(name: str, value: str) -> None:
    assert error_of({f"MILLRACE_{name}": value}).startswith(f"MILLRACE_{name}={value}: accepted: at ")


def test_values_at_the_edge_do_not_contradict() -> None:
    effective = load_settings(
        {
            "engine.max_num_seqs": "32",
            "engine.max_num_batched_tokens": "32",
            "worker.lease_s": "10",
            "limits.max_prompts_per_job": "1000000",
        },
        environ={},
    )

    assert effective.settings.worker.renew_interval_s * 2 == effective.settings.worker.lease_s


def test_a_derived_value_may_not_contradict_either() -> None:
    with pytest.raises(
        SettingsError, match=r"^engine\.max_num_batched_tokens=8: accepted: at least engine\.max_num_se"
    ):
        load_settings(environ={}).with_derived({"engine.max_num_batched_tokens": 8})


def test_models_made_by_hand_are_held_to_the_same() -> None:
    with pytest.raises(ValidationError, match="max_num_seqs must be at most max_num_batched_tokens"):
        EngineSettings(max_num_seqs=9, max_num_batched_tokens=8)
