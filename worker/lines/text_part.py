"""A piece of a message's content."""

from __future__ import annotations

from typing import Literal

from worker.lines.body_model import BodyModel


class TextPart(BodyModel):
    """Text, the only kind of content part that a text model reads."""

    type: Literal["text"]
    text: str
