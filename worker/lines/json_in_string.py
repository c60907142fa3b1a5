"""JSON inside a string of a line."""

from __future__ import annotations

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from settings import LimitSettings
from worker.lines.refusal_error import RefusalError
from worker.lines.strict_json import read_strict_json


def json_in_string(text: str, info: ValidationInfo[LimitSettings], accepted: str) -> object:
    """The value that `text` holds, read as strictly as the line around it and no deeper than that may nest.

    The context of the validation is the line's LimitSettings. Raises PydanticCustomError, which names `accepted`.
    """
    limits = info.context
    try:
        parsed = read_strict_json(text.encode("utf-8", "surrogatepass"), limits.max_json_depth)
        parsed.check()
    except RefusalError as refusal:
        how = f"JSON of at most {limits.max_json_depth} levels (limits.max_json_depth)"
        accepted = f"{accepted}, as {how}, no key twice in an object, finite numbers"
        raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted}) from refusal
    return parsed.value
