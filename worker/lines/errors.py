"""Errors of request lines and of the files they stand in.

Exception
|-- RefusalError      why a line is refused, before the line's number and custom_id are known
|-- LineError         a request line that cannot be run
|-- NotIgnorable      a parameter that cannot be left out of lines
`-- UnreadableInput   an input that breaks off
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar, Self


class RefusalError(Exception):
    """Raised by the parts of the line parser; `parse_request_line` turns it into a LineError."""

    most_told: ClassVar[int] = 8  # faults of one line that its message tells

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param

    @classmethod
    def of_all(cls, faults: Sequence[RefusalError]) -> Self:
        """One refusal for one or more faults of a line: it tells all of them, and code and param are the first's."""
        distinct: dict[str, RefusalError] = {}
        for fault in faults:
            distinct.setdefault(fault.param or fault.message, fault)
        messages = [fault.message for fault in distinct.values() if not fault.follows_from(distinct)]
        if len(messages) > cls.most_told:
            messages[cls.most_told :] = ["and more"]
        ends = [*("" if message.endswith("?") else ";" for message in messages[:-1]), ""]
        text = " also: ".join(map(str.__add__, messages, ends))
        return cls(text, code=faults[0].code, param=faults[0].param)

    def follows_from(self, params: Container[str]) -> bool:
        """Whether faults in `params` explain this one: what a part of a kind that is refused has, is unknown too."""
        parent, _, _ = (self.param or "").rpartition(".")
        return self.code == "unknown_parameter" and f"{parent}.type" in params


class LineError(Exception):
    """One line's own fault: it gets an error record, and the other lines run.

    The message tells all faults that were found, `code` and `param` are the first one's. `code` is stable and meant for
    programs: invalid_json_line, line_too_long, invalid_type, invalid_value, missing_line, missing_parameter,
    empty_prompt, unknown_parameter, unsupported_parameter, unknown_url, url_mismatch, string_too_long,
    duplicate_custom_id, model_mismatch, model_not_found.
    """

    def __init__(
        self, message: str, *, code: str, index: int, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.index = index  # 0-based, blank lines not counted; `line` in records is index + 1
        self.param = param  # path inside the body, `messages[0].content`, or a field of the line
        self.custom_id = custom_id  # None when the line is too broken to have one


class NotIgnorable(ValueError):
    """A parameter that cannot be left out of lines: they would be other requests, or none."""

    def __init__(self, name: str, *, accepted: str) -> None:
        super().__init__(f"{name or 'an empty name'}: it cannot be left out of a line; accepted: {accepted}")
        self.name = name


class UnreadableInput(OSError):
    """A file of request lines, named in the message, that cannot be opened or read to its end."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
