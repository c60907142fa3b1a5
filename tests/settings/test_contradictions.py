"""Settings that are fine one by one and not together."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from settings import EngineSettings, SettingsError, load_settings


def error_of(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ=environ)
    return str(caught.value)


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
