from __future__ import annotations

import sys

import pytest
import redis
from structlog.types import EventDict

from engine.errors import EngineFatal
from worker.runtime.log_setup import ExceptionFields

SECRET = "what a user wrote"


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """`error` as it is caught: with frames, one of which has the secret in a local variable."""
    try:
        local = SECRET
        raise error from cause
    except type(error) as caught:
        assert local
        return caught


def described(error: Exception, *, as_text: bool = False, shows_all_texts: bool = False) -> EventDict:
    fields = ExceptionFields(as_text=as_text, shows_all_texts=shows_all_texts)
    return dict(fields(None, "error", {"event": "broke", "exc_info": error}))


def test_an_exception_is_its_type_text_and_frames() -> None:
    [link] = described(raised(OSError("no space left on device")))["exception"]

    assert (link["type"], link["text"]) == ("OSError", "no space left on device")
    assert len(link["frames"]) == 1
    assert link["frames"][0].startswith(f"{__file__}:")
    assert link["frames"][0].endswith(" raised")


def test_what_caused_it_follows() -> None:
    cause = raised(redis.ConnectionError("refused"))

    chain = described(raised(EngineFatal("the step failed"), cause))["exception"]

    assert [(link["type"], link["text"]) for link in chain] == [
        ("EngineFatal", "the step failed"),
        ("ConnectionError", "refused"),
    ]


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        KeyError(SECRET),
        UnicodeEncodeError("utf-8", SECRET, 0, 1, SECRET),
        AssertionError(SECRET),
        EngineFatal("fine"),  # whose cause quotes it
    ],
)
def test_a_text_that_may_quote_a_prompt_is_hidden_and_locals_always(error: Exception, as_text: bool) -> None:
    cause = raised(TypeError(SECRET))

    event = described(raised(error, cause), as_text=as_text)

    assert SECRET not in repr(event)
    assert type(error).__name__ in repr(event)


def test_it_is_shown_where_everything_is_to_be_logged() -> None:
    [link] = described(raised(ValueError(SECRET)), shows_all_texts=True)["exception"]

    assert link["text"] == SECRET


def test_on_a_terminal_each_frame_has_its_line() -> None:
    text = described(raised(OSError("no space left on device")), as_text=True)["exception"]

    first, second = text.splitlines()
    assert first == "OSError: no space left on device"
    assert second.startswith(f"  {__file__}:")


def test_all_three_ways_of_naming_the_exception_are_understood() -> None:
    fields = ExceptionFields(as_text=False, shows_all_texts=False)
    try:
        raise OSError("away")
    except OSError as error:
        ways: list[object] = [error, sys.exc_info(), True]
        found = [fields(None, "error", {"exc_info": way})["exception"] for way in ways]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("nothing", [None, False, (None, None, None)])
def test_without_an_exception_there_is_no_field(nothing: object) -> None:
    event = ExceptionFields(as_text=False, shows_all_texts=False)(None, "error", {"exc_info": nothing})

    assert dict(event) == {}


def test_a_chain_that_ends_in_itself_ends() -> None:
    first, second = OSError("a"), OSError("b")
    first.__context__, second.__context__ = second, first

    assert len(described(first)["exception"]) == 2
