"""Turns chosen tokens into text, decides where a sequence ends, and hands out finished requests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import EngineFatal
from engine.request import Completion, FinishReason, RequestOutput
from engine.sampler import SampledToken
from engine.scheduling.sequence import RequestState
from engine.structured.matcher import CompiledGrammar, GrammarMatcher
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer


class OutputProcessor:
    """Appends tokens and decides when a sequence has ended.

    Text is made when a sequence ends; as the tokens come only where stop strings are looked for.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._texts: dict[str, tuple[IncrementalDetokenizer, StopStrings]] = {}  # of sequences with stop strings

    def banned_token_ids(self, state: RequestState, position: int) -> tuple[int, ...]:
        """Tokens that, chosen for this position, would end the sequence before its min_tokens."""
        params = state.request.params
        if position - state.num_prompt_tokens >= params.min_tokens:
            return ()
        ending = frozenset() if params.ignore_eos else self._eos_token_ids
        return tuple(sorted(ending | frozenset(params.stop_token_ids)))

    def append(self, state: RequestState, sampled: SampledToken) -> None:
        """Add a token to the sequence; sets its finish_reason if that ends it."""
        token_id, params = sampled.token_id, state.request.params
        state.token_ids.append(token_id)
        if state.counts is not None:
            state.counts.add(token_id)
        if sampled.logprobs is not None:
            state.logprobs.append(sampled.logprobs)
        if token_id in self._eos_token_ids and not params.ignore_eos:
            state.finish_reason = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            state.finish_reason, state.stop_reason = FinishReason.STOP, token_id
        else:
            if params.stop:
                self._append_text(state, token_id)
            if state.matcher is not None:
                self._follow_grammar(state, state.matcher, [token_id])
        if state.finish_reason is None and len(state.token_ids) >= state.max_len:
            state.finish_reason = FinishReason.LENGTH
        if state.finish_reason is not None:
            self.flush(state)

    def constrain(self, state: RequestState, grammar: CompiledGrammar) -> None:
        """Make a sequence follow a grammar, from the tokens on that it has from a resume state."""
        state.matcher = grammar.new_matcher(self._eos_token_ids.union(state.request.params.stop_token_ids))
        was_finished = state.is_finished  # by its length, perhaps at the token that ends the grammar too
        self._follow_grammar(state, state.matcher, state.output_token_ids)
        if state.is_finished and not was_finished:
            self.flush(state)

    def completion(self, state: RequestState) -> Completion:
        """What a finished sequence generated; forgets its text state."""
        self.forget(state)
        if state.finish_reason is None:
            raise EngineFatal(f"sequence {state.sequence_id!r} has not finished")
        return Completion(
            index=state.index,
            text="".join(state.text_parts),
            token_ids=tuple(state.output_token_ids),
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            logprobs=tuple(state.logprobs) if state.request.params.logprobs is not None else None,
        )

    def forget(self, state: RequestState) -> None:
        """Drop the text state of a sequence that ended."""
        self._texts.pop(state.sequence_id, None)

    def _text(self, state: RequestState) -> tuple[IncrementalDetokenizer, StopStrings]:
        pair = self._texts.get(state.sequence_id)
        if pair is None:
            pair = (self._new_detokenizer(state), StopStrings(state.request.params.stop))
            self._texts[state.sequence_id] = pair
        return pair

    def _new_detokenizer(self, state: RequestState) -> IncrementalDetokenizer:
        return self._tokenizer.new_detokenizer(goes_on=state.request.goes_on)

    def _append_text(self, state: RequestState, token_id: int) -> None:
        detokenizer, stops = self._text(state)
        text = detokenizer.append(token_id)
        if state.num_output_tokens <= state.request.params.min_tokens:
            state.text_parts.append(text)  # stop strings count only after min_tokens
        else:
            self._feed(state, stops, text)

    def _follow_grammar(self, state: RequestState, matcher: GrammarMatcher, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            matcher.accept(token_id)
        if state.finish_reason in {None, FinishReason.LENGTH} and token_ids and matcher.is_over:
            state.finish_reason = FinishReason.STOP

    def _feed(self, state: RequestState, stops: StopStrings, text: str) -> None:
        state.text_parts.append(stops.feed(text))
        if stops.matched is not None:
            state.finish_reason, state.stop_reason = FinishReason.STOP, stops.matched

    def flush(self, state: RequestState) -> None:
        """End the sequence: release the text that was withheld, unless a stop string was found."""
        if not state.request.params.stop:
            state.text_parts = [self._whole_text(state)]
            return
        detokenizer, stops = self._text(state)
        if stops.matched is None:
            self._feed(state, stops, detokenizer.flush())
        if stops.matched is None:
            state.text_parts.append(stops.flush())

    def _whole_text(self, state: RequestState) -> str:
        """The text of all tokens but one that ended it."""
        token_ids, params = state.output_token_ids, state.request.params
        if token_ids and (
            token_ids[-1] in params.stop_token_ids or (token_ids[-1] in self._eos_token_ids and not params.ignore_eos)
        ):
            token_ids.pop()
        detokenizer = self._new_detokenizer(state)
        return "".join((*map(detokenizer.append, token_ids), detokenizer.flush()))


class StopStrings:
    """Releases text up to the first stop string, and withholds what may be the beginning of one.

    It goes character by character, so the result does not depend on how the text is cut into tokens: the stop string
    that is complete first ends the text; if several are complete at the same character, the longest one. Each character
    costs amortised constant time for each stop string (Knuth-Morris-Pratt).
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        """`stop`: strings that are not empty."""
        if not all(stop):
            raise ValueError("a stop string is empty; accepted: at least one character each")
        self.matched: str | None = None  # the stop string that ended the text
        self._stop = stop
        self._fallbacks = [_fallback_table(string) for string in stop]
        self._progress = [0] * len(stop)  # characters of each stop string that the text so far ends with
        self._withheld = ""

    def feed(self, new_text: str) -> str:
        """Add text; returns what is now certain to be before any stop string. Nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return new_text
        pending = self._withheld + new_text
        for position, character in enumerate(new_text, start=len(self._withheld)):
            matched = self._advance(character)
            if matched is not None:
                self.matched = matched
                self._withheld = ""
                return pending[: position + 1 - len(matched)]
        certain = len(pending) - max(self._progress, default=0)
        self._withheld = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """End the text: returns what was withheld, which was no stop string after all."""
        withheld, self._withheld = self._withheld, ""
        self._progress = [0] * len(self._stop)
        return withheld

    def _advance(self, character: str) -> str | None:
        """Take one character in; returns the longest stop string that it completes."""
        matched: str | None = None
        for index, string in enumerate(self._stop):
            fallback = self._fallbacks[index]
            progress = self._progress[index]
            while progress > 0 and string[progress] != character:
                progress = fallback[progress - 1]
            if string[progress] == character:
                progress += 1
            self._progress[index] = progress
            if progress == len(string) and (matched is None or len(string) > len(matched)):
                matched = string
        return matched


def _fallback_table(string: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(string)
    length = 0
    for position in range(1, len(string)):
        while length > 0 and string[position] != string[length]:
            length = table[length - 1]
        if string[position] == string[length]:
            length += 1
        table[position] = length
    return table


class FinishedRequests:
    """Collects the outputs of requests that ended, and counts their tokens."""

    def __init__(self) -> None:
        self._ready: list[RequestOutput] = []
        self.num_requests = self.num_duplicates = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    @property
    def is_empty(self) -> bool:
        """Whether `take` has nothing to hand out."""
        return not self._ready

    def add(self, output: RequestOutput, *, num_output_tokens: int, is_duplicate: bool) -> None:
        """Take the output of a request. is_duplicate: the results are those of an equal request."""
        self._ready.append(output)
        self.num_requests += 1
        self.num_duplicates += is_duplicate
        self.prompt_tokens += output.num_prompt_tokens
        self.cached_tokens += output.num_cached_tokens
        self.output_tokens += num_output_tokens

    def take(self) -> list[RequestOutput]:
        """The outputs since the last call."""
        ready, self._ready = self._ready, []
        return ready
