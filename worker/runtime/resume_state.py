"""Writes how far a prompt had come as one line of JSON, for Redis, and reads it back."""

from __future__ import annotations

import json
import math

from engine.request import ResumeState, SequenceResumeState, TokenLogprobs
from worker.registry.exchange import Untyped


def encode_resume_state(resume_state: ResumeState) -> str:
    """One line of ASCII: 4 to 7 bytes a token, and some 40 for each log-probability. Numbers come back bit for bit."""
    sequences = [[sequence.token_ids, _of_logprobs(sequence.logprobs)] for sequence in resume_state.sequences]
    # The base seed as text: Lua's numbers, should a script ever read it, have 53 bits.
    value = {"identity": resume_state.identity, "seed": str(resume_state.base_seed), "sequences": sequences}
    return json.dumps(value, separators=(",", ":"))


def decode_resume_state(raw: bytes) -> ResumeState:
    """Read it back; the engine checks whether it fits a request. Raises ValueError if it is none."""
    try:
        value = json.loads(raw)
        return ResumeState(
            identity=_text(value["identity"]),
            base_seed=int(_text(value["seed"])),
            sequences=tuple(
                SequenceResumeState(tuple(_whole(token_id) for token_id in token_ids), _logprobs(logprobs))
                for token_ids, logprobs in value["sequences"]
            ),
        )
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it has another shape: {type(error).__name__}: {error}") from error


def _of_logprobs(logprobs: tuple[TokenLogprobs, ...] | None) -> list[tuple[object, ...]] | None:
    return None if logprobs is None else [(item.token_id, item.logprob, item.top) for item in logprobs]


def _logprobs(value: Untyped) -> tuple[TokenLogprobs, ...] | None:
    if value is None:
        return None
    return tuple(
        TokenLogprobs(_whole(token_id), _number(logprob), tuple((_whole(one), _number(its)) for one, its in top))
        for token_id, logprob, top in value
    )


def _text(value: Untyped) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value


def _whole(value: Untyped) -> int:
    if type(value) is not int:  # a bool is an int to isinstance
        raise TypeError(f"{type(value).__name__} instead of a whole number")
    return value


def _number(value: Untyped) -> float:
    if type(value) is not float or math.isnan(value):
        raise TypeError(f"{value!r:.40} instead of a number")
    return value
