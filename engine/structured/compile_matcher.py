"""From a grammar's definition to a matcher in its first state."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The library's own limits but for two. Every sequence has lexer states of its own: 20,000 take 3 to 8 MB of each, and
# the library would go to 250,000. A row of the parser has four items for each optional property where an object begins:
# the library's 2,000 ended objects of 500. With 2,000 properties the slowest mask took 0.08 s, with 4,500 0.4 s.
MAX_LEXER_STATES = 20_000
MAX_ITEMS_IN_ROW = 8_200

_TOKEN_FAULT = re.compile(r"unknown special token: .*|Token range end too large: .*|invalid token range: .*")
_TOKEN_RULE = "accepted for a token: <[id]>, one id that the model has, in place of its text, a range or a list"


def compile_matcher(tokenizer: LLTokenizer, definition: str) -> tuple[LLMatcher, bytes]:
    """The matcher and its first mask, a bit a token in words of 32, which costs most of all.

    Raises ValueError saying why they cannot be.
    """
    limits = LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, definition, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(_reason(matcher))
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"nothing can be written by it ({_reason(matcher)})")
    return matcher, mask


def _reason(matcher: LLMatcher) -> str:
    """The library's reason. What it says of tokens is about a vocabulary that may not be the model's."""
    return _TOKEN_FAULT.sub(_TOKEN_RULE, matcher.get_error().removesuffix("<non-verbose/>").strip())
