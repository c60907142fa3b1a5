from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.outputs import StopStrings

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4).map(tuple)


def naive(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: the text grows by one character at a time and ends as soon as it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    stops = StopStrings(stop)
    text = "".join(stops.feed(piece) for piece in pieces)
    return text + stops.flush(), stops.matched


@settings(max_examples=250)
@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=10), STOPS)
@example(["aaab"], ("aab",))
@example(["aba", "babb"], ("ababb",))
def test_however_the_text_is_cut_the_result_is_that_of_the_naive_search(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    assert run(pieces, stop) == naive("".join(pieces), stop)


@given(LETTERS, STOPS)
def test_what_is_released_never_contains_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    released, matched = run(list(text), stop)
    assert not any(string in released for string in stop)
    assert (matched is None) == (released == text)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stops = StopStrings(stop)
    released = stops.feed(text)
    if stops.matched is None:
        held = text[len(released) :]
        assert held == "" or any(string.startswith(held) and string != held for string in stop)
        assert stops.flush() == held


def test_a_stop_string_across_pieces_is_found_and_left_out() -> None:
    stops = StopStrings(("</end>",))
    assert stops.feed("a < b </") == "a < b "
    assert stops.feed("en") == ""
    assert stops.feed("d> more") == ""
    assert stops.matched == "</end>"
    assert stops.flush() == ""


def test_what_was_no_stop_string_is_released() -> None:
    stops = StopStrings(("</end>",))
    assert stops.feed("x</e") == "x"
    assert stops.feed("m>") == "</em>"
    assert stops.feed("</") == ""
    assert stops.flush() == "</"
    assert stops.matched is None


def test_after_a_match_nothing_is_released() -> None:
    stops = StopStrings(("b",))
    assert stops.feed("abc") == "a"
    assert stops.feed("def") == ""
    assert stops.matched == "b"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("bcd", "c"), ("ab", "c")),  # "c" is complete before "bcd" is
        (("cd", "bcd"), ("a", "bcd")),  # both are complete at "d": the longer one
        (("cd", "abcde"), ("ab", "cd")),
        ((), ("abcdef", None)),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(stop: tuple[str, ...], expected: tuple[str, str | None]) -> None:
    assert run(["abcdef"], stop) == expected
    assert run(list("abcdef"), stop) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""))


def test_a_long_stop_string_costs_no_more_than_its_length() -> None:
    stops = StopStrings(("a" * 20_000 + "b",))
    released = "".join(stops.feed("a") for _ in range(70_001))
    assert released == "a" * 50_001
    assert stops.flush() == "a" * 20_000
