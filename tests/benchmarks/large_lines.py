"""Request lines of a large job."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

WORDS = (" the", " and", " you", " are", " a", " is", " system", " user")
TEXT_BYTES = 1 << 20  # one text, of which each line has another piece
SYSTEM = "You are an assistant and you answer the user in one line."


def large_lines(num_lines: int, line_bytes: int) -> Iterator[bytes]:
    """Chat lines of about `line_bytes` bytes, no two the same; the tests' tokenizer makes a token of three bytes."""
    random_ = random.Random(0)
    text = "".join(random_.choices(WORDS, k=TEXT_BYTES // 3))
    for number in range(num_lines):
        begin = random_.randrange(TEXT_BYTES // 2)
        question = f"Question {number}:" + text[begin : begin + max(line_bytes - 260, 0)]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"model": "millrace", "messages": messages, "max_tokens": 16, "temperature": 0.7}
        line = {"custom_id": f"large-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(line).encode()
