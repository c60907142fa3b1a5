"""Cuts the tokens of a text, or of a pair of texts, to a number, as transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import tokenizers

from engine.errors import CheckpointError, InvalidRequest

TextPair = tuple[str, str]
TruncationSide = Literal["left", "right"]


class EncodedInput(NamedTuple):
    """What a model that reads whole texts is given."""

    token_ids: Sequence[int]
    second_start: int  # where the tokens of a pair's second text begin; the length of `token_ids` where there are none


def cut(encoding: tokenizers.Encoding, limit: int | None, side: TruncationSide) -> EncodedInput | InvalidRequest:
    """The tokens that are left of an encoding, `limit` at most; the refusal where no text would be left.

    side: the end at which a text loses tokens. Special tokens stay: transformers cuts the texts before it adds them.
    Returned, not raised: one text that cannot be cut must not cost those that were encoded with it. Raises
    CheckpointError for a tokenizer whose pairs have no two segments.
    """
    ids, types = encoding.ids, encoding.type_ids
    if limit is not None and len(ids) > limit:
        texts = encoding.sequence_ids  # 0, 1; None: a special token
        num_special = texts.count(None)
        if limit <= num_special:
            return no_room(limit, f"the {num_special} special tokens around it")
        kept = _kept(texts, limit - num_special, side)
        ids, types = [ids[place] for place in kept], [types[place] for place in kept]
    second_start = types.index(1) if 1 in types else len(types)
    if types[second_start:].count(1) != len(types) - second_start:
        raise CheckpointError("tokenizer.json: the post_processor mixes the segments of a pair; accepted: 0, then 1")
    return EncodedInput(ids, second_start)


def cut_ids(token_ids: Sequence[int], limit: int | None, side: TruncationSide) -> Sequence[int]:
    """Token ids that came as such, at most `limit`; they have no special tokens around them to keep."""
    if limit is None or len(token_ids) <= limit:
        return token_ids
    return token_ids[-limit:] if side == "left" else token_ids[:limit]


def _kept(texts: Sequence[int | None], room: int, side: TruncationSide) -> list[int]:
    """The places, rising, of the special tokens and of the `room` tokens of texts that stay."""
    left = dict(enumerate(_lengths_within(room, texts.count(0), texts.count(1))))
    places = range(len(texts))
    kept: list[int] = []
    for place in reversed(places) if side == "left" else places:
        text = texts[place]
        if text is None or left[text] > 0:
            kept.append(place)
        if text is not None:
            left[text] -= 1
    return sorted(kept)


def _lengths_within(room: int, first: int, second: int) -> tuple[int, int]:
    """How many tokens of two texts stay where `room` is for both: the longer one gives first. One text: second is 0."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if first <= second else (long, short)


def no_room(limit: int, fixed: str) -> InvalidRequest:
    """Why a text cannot be cut to `limit` tokens: `fixed` says which tokens stay."""
    accepted = f"more than {fixed}"
    return InvalidRequest(
        f"truncate_prompt_tokens is {limit}; accepted: {accepted}",
        param="truncate_prompt_tokens",
        value=limit,
        accepted=accepted,
    )
