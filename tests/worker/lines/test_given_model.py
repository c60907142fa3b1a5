from __future__ import annotations

import pytest

from tests.support.request_lines import chat_line, parse
from worker.lines.chat import ChatBody, ChatMessage


def _message(**message: object) -> ChatMessage:
    body = parse(chat_line(messages=[message])).body
    assert isinstance(body, ChatBody)
    return body.messages[0]


@pytest.mark.parametrize("keys", [("role", "content", "name"), ("name", "content", "role")])
def test_a_message_keeps_the_order_its_line_had(keys: tuple[str, ...]) -> None:
    values = {"role": "user", "content": "hello", "name": "a"}
    assert list(_message(**{key: values[key] for key in keys}).as_given()) == list(keys)


def test_a_null_that_counts_as_absent_is_still_in_what_was_given() -> None:
    message = _message(role="user", content="hello", name=None)
    assert message.name is None
    assert message.as_given() == {"role": "user", "content": "hello", "name": None}


def test_what_was_given_cannot_be_changed_through_a_copy() -> None:
    message = _message(role="user", content="hello")
    message.as_given()["content"] = "other"
    assert message.as_given() == {"role": "user", "content": "hello"}
