"""What an offline run did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Figures of an offline run; the fields are the keys of `millrace run --summary`."""

    load_s: float  # loading the model and warming it up
    elapsed_s: float  # from the first line read to the last record written, without loading
    requests: int  # records written, failed ones included
    failed: int
    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    output_tokens: int
