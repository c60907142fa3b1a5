"""Fields that OpenAI accepts and that have no effect on a batch's answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.request_lines import chat_line, completion_line, error_of, parse
from worker.lines.fields import ServiceFields

GIVEN: dict[str, object] = {
    "user": "u",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "text"},
}


@pytest.mark.parametrize("line", [completion_line, chat_line])
def test_every_service_field_is_accepted_and_changes_nothing(line: Callable[..., bytes]) -> None:
    assert set(GIVEN) == set(ServiceFields.model_fields)
    with_fields, without = parse(line(**GIVEN)), parse(line())

    assert with_fields.prompt_key() == without.prompt_key()
    plain = dict.fromkeys(GIVEN)
    assert with_fields.body.model_dump() | plain == without.body.model_dump()


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("user", 3, "invalid_type"),
        ("metadata", {"a": 1}, "invalid_type"),
        ("store", "yes", "invalid_type"),
        ("service_tier", "best", "invalid_value"),
        ("prompt_cache_retention", "for ever", "invalid_value"),
        ("prediction", "text", "invalid_type"),
    ],
)
def test_a_service_field_has_openais_form(name: str, value: object, code: str) -> None:
    error = error_of(chat_line(**{name: value}))

    assert error.code == code
    assert error.param is not None
    assert error.param.startswith(name)
