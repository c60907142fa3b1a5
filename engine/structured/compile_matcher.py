"""From a grammar's definition to a matcher in its first state."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The library's own limits but for the lexer's states (1 to 2 kB each, of every sequence by itself): 250,000 were half
# a gigabyte. Fuel bounds a mask at some 15 ms.
MAX_LEXER_STATES = 20_000


def compile_matcher(tokenizer: LLTokenizer, definition: str) -> LLMatcher:
    """The matcher, its first mask computed, which costs most of all. Raises ValueError saying why it cannot be."""
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, definition, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(_reason(matcher))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"nothing can be written by it ({_reason(matcher)})")
    return matcher


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()
