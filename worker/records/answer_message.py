"""A chat answer as the API's message."""

from __future__ import annotations

import hashlib

from worker.answers.chat_answer import ChatAnswer


def answer_message(answer: ChatAnswer, completion_id: str, choice: int) -> dict[str, object]:
    """`choices[].message` of a chat completion. A call's id follows from where it stands, so it is always the same."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": _call_id(f"{completion_id}/{choice}/{number}"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(answer.calls)
        ]
    return message


def _call_id(place: str) -> str:
    # A digest, since ids go back into conversations, where OpenAI takes up to 40 characters.
    return "call_" + hashlib.blake2b(place.encode("utf-8"), digest_size=12).hexdigest()
