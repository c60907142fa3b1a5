"""Log-probabilities in the two endpoints' shapes. One entry a generated token, the ending token included, and one a
token of an echoed prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.records.chosen_token import ChosenToken
from worker.records.echoed_prompt import EchoedPrompt
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


def text_logprobs(
    chosen: Sequence[ChosenToken], spelling: TokenSpelling, echo: EchoedPrompt | None = None
) -> dict[str, object]:
    """`choices[].logprobs` of a text completion, behind those of the prompt where it is echoed.

    `top_logprobs` always holds the token itself too. Two tokens may have the same text; the more likely one keeps the
    key. Of a prompt's first token, which nothing predicts, both are null.
    """
    token_ids = [token.token_id for token in chosen]
    entries: list[ChosenToken | None] = list(chosen)
    offsets: list[int] = []
    offset = 0
    if echo is not None:
        token_ids, entries = [*echo.token_ids, *token_ids], [*echo.entries, *entries]
        offsets, offset = list(echo.offsets), len(echo.text)
    tokens = [spelling.token_text(token_id) for token_id in token_ids]
    for text in tokens[len(offsets) :]:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(*pair, spelling) for pair in zip(entries, tokens, strict=True)],
        "text_offset": offsets,
    }


def _top(entry: ChosenToken | None, text: str, spelling: TokenSpelling) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        top.setdefault(spelling.token_text(token_id), _finite(logprob))
    top.setdefault(text, _finite(entry.logprob))
    return top


def _chat_token(token_id: int, logprob: float, spelling: TokenSpelling) -> dict[str, object]:
    return {
        "token": spelling.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(spelling.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
