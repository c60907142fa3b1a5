"""Log-probabilities in the two endpoints' shapes. One entry a generated token, the ending token included."""

from __future__ import annotations

from collections.abc import Sequence

from worker.records.chosen_token import ChosenToken
from worker.records.token_spelling import TokenSpelling

LOWEST_LOGPROB = -9999.0  # OpenAI's and vLLM's stand-in for minus infinity, which JSON cannot write


def chat_logprobs(chosen: Sequence[ChosenToken], spelling: TokenSpelling) -> dict[str, object]:
    """`choices[].logprobs` of a chat completion."""
    content = [
        {
            **_chat_token(token.token_id, token.logprob, spelling),
            "top_logprobs": [_chat_token(token_id, logprob, spelling) for token_id, logprob in token.top],
        }
        for token in chosen
    ]
    return {"content": content, "refusal": None}


def text_logprobs(chosen: Sequence[ChosenToken], spelling: TokenSpelling) -> dict[str, object]:
    """`choices[].logprobs` of a text completion. `top_logprobs` always holds the chosen token too.

    Two tokens may have the same text; the more likely one keeps the key.
    """
    tokens = [spelling.token_text(token.token_id) for token in chosen]
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    offset = 0
    for text, token in zip(tokens, chosen, strict=True):
        offsets.append(offset)
        offset += len(text)
        top: dict[str, float] = {}
        for token_id, logprob in token.top:
            top.setdefault(spelling.token_text(token_id), _finite(logprob))
        top.setdefault(text, _finite(token.logprob))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(token.logprob) for token in chosen],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _chat_token(token_id: int, logprob: float, spelling: TokenSpelling) -> dict[str, object]:
    return {
        "token": spelling.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(spelling.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
