from __future__ import annotations

import pytest

from worker.records.reasoning_tokens import reasoning_tokens


def test_thinking_is_what_the_usage_says() -> None:
    usage = {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}}
    assert reasoning_tokens({"response": {"body": {"usage": usage}}}) == 4


@pytest.mark.parametrize(
    "record", [{}, {"response": None}, {"response": {"body": {"error": {}}}}, {"response": {"body": {"usage": {}}}}]
)
def test_without_a_word_about_it_there_was_none(record: dict[str, object]) -> None:
    assert reasoning_tokens(record) == 0
