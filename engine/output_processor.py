"""From chosen tokens to text, and to the end of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from engine.completion import Completion
from engine.errors import EngineFatal
from engine.finish_reason import FinishReason
from engine.sampling.sampled_token import SampledToken
from engine.scheduling.request_state import RequestState
from engine.structured.compiled_grammar import CompiledGrammar
from engine.structured.grammar_matcher import GrammarMatcher
from engine.text.incremental_detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer


class OutputProcessor:
    """Appends tokens, detokenises as they come, and decides when a sequence has ended."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._texts: dict[str, tuple[IncrementalDetokenizer, StopStrings]] = {}

    def banned_token_ids(self, state: RequestState, position: int) -> tuple[int, ...]:
        """Tokens that, chosen for this position, would end the sequence before its min_tokens."""
        params = state.request.params
        if position - state.num_prompt_tokens >= params.min_tokens:
            return ()
        ending = frozenset() if params.ignore_eos else self._eos_token_ids
        return tuple(sorted(ending | frozenset(params.stop_token_ids)))

    def append(self, state: RequestState, sampled: SampledToken) -> None:
        """Add a token to the sequence; sets its finish_reason if that ends it."""
        token_id = sampled.token_id
        state.token_ids.append(token_id)
        if state.counts is not None:
            state.counts.add(token_id)
        if sampled.logprobs is not None:
            state.logprobs.append(sampled.logprobs)
        params = state.request.params
        if token_id in self._eos_token_ids and not params.ignore_eos:
            state.finish_reason = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            state.finish_reason, state.stop_reason = FinishReason.STOP, token_id
        else:
            self._append_text(state, token_id)
            if state.matcher is not None:
                self._follow_grammar(state, state.matcher, [token_id])
        if state.finish_reason is None and state.num_output_tokens >= state.max_tokens:
            state.finish_reason = FinishReason.LENGTH
        if state.is_finished:
            self.flush(state)

    def constrain(self, state: RequestState, grammar: CompiledGrammar) -> None:
        """Hold a sequence to a grammar; tokens it has already, of a checkpoint, are followed first."""
        state.matcher = grammar.new_matcher(self._eos_token_ids.union(state.request.params.stop_token_ids))
        self._follow_grammar(state, state.matcher, state.output_token_ids)
        if state.is_finished:
            self.flush(state)

    def completion(self, state: RequestState) -> Completion:
        """The finished sequence as its caller sees it; forgets its text state."""
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
            pair = (self._tokenizer.new_detokenizer(), StopStrings(state.request.params.stop))
            self._texts[state.sequence_id] = pair
        return pair

    def _append_text(self, state: RequestState, token_id: int) -> None:
        detokenizer, stops = self._text(state)
        text = detokenizer.append(token_id)
        if state.num_output_tokens <= state.request.params.min_tokens:
            state.text_parts.append(text)  # stop strings are looked for only in what comes after min_tokens
        else:
            self._feed(state, stops, text)

    def _follow_grammar(self, state: RequestState, matcher: GrammarMatcher, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            matcher.accept(token_id)
        if state.finish_reason is None and token_ids and matcher.is_over:
            state.finish_reason = FinishReason.STOP

    def _feed(self, state: RequestState, stops: StopStrings, text: str) -> None:
        state.text_parts.append(stops.feed(text))
        if stops.matched is not None:
            state.finish_reason, state.stop_reason = FinishReason.STOP, stops.matched

    def flush(self, state: RequestState) -> None:
        """The sequence ends here: release the text that was held back, unless a stop string was found."""
        detokenizer, stops = self._text(state)
        if stops.matched is None:
            self._feed(state, stops, detokenizer.flush())
        if stops.matched is None:
            state.text_parts.append(stops.flush())
