"""Output held to a grammar."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from settings.group_config import GROUP_CONFIG
from settings.units import Bytes, Seconds, Unit


class StructuredOutputSettings(BaseModel):
    """What a request's grammar may cost; one that costs more fails its request alone."""

    model_config = GROUP_CONFIG

    max_grammar_bytes: Bytes = Field(
        default=65_536, ge=1, le=16_777_216, description="Largest grammar: text of its schema, expression or rules."
    )
    compile_timeout_s: Seconds = Field(
        default=5.0, ge=0.1, le=600, description="Longest time in which a grammar may be compiled."
    )
    max_compile_bytes: Bytes = Field(
        default=536_870_912,
        ge=134_217_728,
        le=1_099_511_627_776,
        description="Most memory in which a grammar may be compiled: address space of the process that tries it.",
    )
    cached_grammars: Annotated[int, Unit("grammars")] = Field(
        default=256, ge=1, le=65_536, description="Compiled grammars that are kept; the least recently used go first."
    )
