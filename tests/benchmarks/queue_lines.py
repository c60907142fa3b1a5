"""Request lines of an ordinary job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

SYSTEM_PROMPTS = tuple(f"You are assistant number {i} and you answer the user in one line. " * 2 for i in range(5))


def queue_lines(num_lines: int) -> Iterator[bytes]:
    """Batch lines of about 360 bytes: conversations and completions in turn, five system prompts."""
    for number in range(num_lines):
        system, question = SYSTEM_PROMPTS[number % 5], f"Question {number}: is {number * 7919 % 10007} a prime?"
        body: dict[str, Any] = {"max_tokens": 16, "temperature": 0.7, "seed": number}
        if number % 2:
            url, body["prompt"] = "/v1/completions", f"{system}{question}"
        else:
            url = "/v1/chat/completions"
            body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        yield json.dumps({"custom_id": f"q-{number}", "method": "POST", "url": url, "body": body}).encode()
