"""Finds stop strings in text that arrives piece by piece."""

from __future__ import annotations


class StopStrings:
    """Releases text up to the first stop string, holding back what may be the beginning of one.

    The text is judged character by character, so the result does not depend on how it is cut into tokens: the stop
    string that is complete first ends the text, and of several complete at the same character the longest one, which
    starts earliest. The text released never contains a stop string. Each character costs amortised constant time for
    each stop string (Knuth-Morris-Pratt).
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        """`stop`: strings that are not empty."""
        if not all(stop):
            raise ValueError("a stop string is empty; accepted: at least one character each")
        self.matched: str | None = None  # the stop string that ended the text
        self._stop = stop
        self._fallbacks = [_fallback_table(string) for string in stop]
        self._progress = [0] * len(stop)  # characters of each stop string that the text so far ends with
        self._held = ""

    def feed(self, new_text: str) -> str:
        """Add text; returns what is now certain to be before any stop string. After a match: nothing, ever."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return new_text
        pending = self._held + new_text
        for position, character in enumerate(new_text, start=len(self._held)):
            matched = self._advance(character)
            if matched is not None:
                self.matched = matched
                self._held = ""
                return pending[: position + 1 - len(matched)]
        certain = len(pending) - max(self._progress, default=0)
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """The text ends here: returns what was held back, which was no stop string after all."""
        held, self._held = self._held, ""
        self._progress = [0] * len(self._stop)
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character in; returns the longest stop string that it completes."""
        matched: str | None = None
        for index, string in enumerate(self._stop):
            fallback = self._fallbacks[index]
            progress = self._progress[index]
            while progress > 0 and string[progress] != character:
                progress = fallback[progress - 1]
            if string[progress] == character:
                progress += 1
            self._progress[index] = progress
            if progress == len(string) and (matched is None or len(string) > len(matched)):
                matched = string
        return matched


def _fallback_table(string: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length > 0 and string[position] != string[length]:
            length = table[length - 1]
        if string[position] == string[length]:
            length += 1
        table[position] = length
    return table
