"""Where a command's records go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from worker.cli.bad_usage import BadUsage
from worker.cli.data_files import STANDARD, refuse_same_file

OUTPUT_NAME = "output.jsonl"
ERRORS_NAME = "errors.jsonl"
OUTPUT_HELP = f"- is stdout, NAME.gz is compressed, a directory (or NAME/) gets {OUTPUT_NAME} and {ERRORS_NAME}."


@dataclass(frozen=True, slots=True)
class RecordPaths:
    """One file for all records, or one for those with an answer and one for those without, as OpenAI keeps them."""

    output: str
    errors: str | None  # None: with the others

    @classmethod
    def of(cls, output: str, errors: str | None = None) -> Self:
        """As `-o` and `--errors-file` say; a directory holds output.jsonl and errors.jsonl, and is made if need be.

        What ends in / is a directory. Raises BadUsage for a directory that cannot be had, and for one file twice.
        """
        if output != STANDARD and (output.endswith(os.sep) or os.path.isdir(output)):
            try:
                Path(output).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadUsage(f"{output}: {error.strerror}") from error
            errors = str(Path(output, ERRORS_NAME)) if errors is None else errors
            output = str(Path(output, OUTPUT_NAME))
        if errors is not None:
            if output == errors == STANDARD:
                raise BadUsage("--errors-file -: standard output is the output's; accepted: a file")
            refuse_same_file(errors, other=output, role="output")
        return cls(output, errors)

    def __iter__(self) -> Iterator[str]:
        yield self.output
        if self.errors is not None:
            yield self.errors
