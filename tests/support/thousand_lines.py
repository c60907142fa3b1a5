"""A file of 1,000 request lines of which 20 are bad, in 10 ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

NUM_LINES = 1000
MAX_TOKENS = 4
SYSTEM_PROMPTS = tuple(f"You are assistant number {i} and you answer the user. " * 3 for i in range(5))

# Kind of bad line -> (the field its error must name, how it is written for a custom_id).
BAD_KINDS: dict[str, tuple[str | None, Callable[[str], str]]] = {
    "bad JSON": (None, '{{"custom_id": "{}", "body": {{"prompt": "x"'.format),
    "duplicate custom_id": ("custom_id", lambda name: _line("line-0", prompt="again")),
    "unknown parameter": ("temprature", lambda name: _line(name, prompt="x", temprature=1)),
    "wrong type": ("max_tokens", lambda name: _line(name, prompt="x", max_tokens="many")),
    "prompt longer than the context": ("prompt", lambda name: _line(name, prompt=[1] * 2000)),
    "empty prompt": ("prompt", lambda name: _line(name, prompt="")),
    "token id out of range": ("prompt", lambda name: _line(name, prompt=[1, 2, 100000])),
    "unknown url": ("url", lambda name: _line(name, url="/v1/poems", prompt="x")),
    "lone surrogate": ("prompt", lambda name: _line(name, prompt="half a pair: \ud83d")),
    "NaN temperature": ("temperature", lambda name: _line(name, prompt="x", temperature=float("nan"))),
}


def _line(custom_id: str, *, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def _good_line(number: int) -> str:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0}
    system = SYSTEM_PROMPTS[number % len(SYSTEM_PROMPTS)]
    if number % 2:
        return _line(f"line-{number}", prompt=f"{system}Question {number}?", return_token_ids=True, **options)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}?"}]
    return _line(f"line-{number}", url="/v1/chat/completions", messages=messages, **options)


def bad_line_numbers() -> dict[int, str]:
    """Line number (from 0) -> kind: every kind twice, spread over the file."""
    kinds = list(BAD_KINDS)
    return {25 + 50 * index: kinds[index % len(kinds)] for index in range(2 * len(kinds))}


def thousand_lines() -> list[str]:
    """The lines of the file."""
    bad = bad_line_numbers()
    return [
        BAD_KINDS[bad[number]][1](f"line-{number}") if number in bad else _good_line(number)
        for number in range(NUM_LINES)
    ]
