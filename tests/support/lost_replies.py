"""A Redis whose reply gets lost after the command was carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis


def lose_next_script_reply(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `client` lose the reply to its next script, so that it sends the call again. What was lost, as it happens."""
    parse_response: Callable[..., Any] = client.parse_response
    lost: list[str] = []

    def parse_and_lose(connection: Any, command_name: str, **options: Any) -> Any:
        reply = parse_response(connection, command_name, **options)
        if command_name == "EVALSHA" and not lost:
            lost.append(command_name)
            raise redis.ConnectionError("the reply got lost")
        return reply

    monkeypatch.setattr(client, "parse_response", parse_and_lose)
    return lost
