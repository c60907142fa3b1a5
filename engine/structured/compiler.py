"""Compiles grammars for the model's vocabulary, on a thread beside the engine, and keeps what it compiled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from engine.errors import InvalidRequest
from engine.structured.grammar import Grammar
from engine.structured.matcher import CompiledGrammar, unpack
from engine.structured.trial import GrammarTrials, compile_matcher
from engine.text.tokenizer import Tokenizer
from settings import StructuredOutputSettings

# Twice what the trial has, so that what passed it fits. Not the default: where the stack's limit is "unlimited", glibc
# gives a thread 2 MiB, and there 1,200 chained $refs that had passed the trial ended the process.
STACK_BYTES = 8 << 20
MAX_LINE_CHARS, MAX_LINES = 120, 6  # of the reason for a refusal


class GrammarCompiler:
    """Compiles grammars for one model on a thread of its own, one at a time; the least recently used are forgotten.

    Nothing is started before the first grammar, which also waits for the vocabulary (1.2 s for 150,000 tokens, under
    the interpreter's lock). The engine's thread calls it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: StructuredOutputSettings,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._trials: GrammarTrials | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar, once it is ready; refusals are remembered too.

        The future raises InvalidRequest without `param` (invalid_grammar, grammar_too_large, grammar_too_complex), or
        EngineUnavailable, which is not remembered, if the grammar could not be tried.
        """
        found = self._compiled.get(grammar)
        if found is None or _may_pass(found):
            found = self._compiled[grammar] = self._submit(grammar)
            self._forget_oldest()
        self._compiled.move_to_end(grammar)
        return found

    def close(self) -> None:
        """End thread and child process without waiting, and cancel what waits. Another grammar starts them again."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._trials is not None:
            self._trials.close()
        self._thread = self._trials = None
        kept = [(grammar, future) for grammar, future in self._compiled.items() if future.done()]
        self._compiled = OrderedDict(kept)

    def _submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        if self._thread is None or self._trials is None:
            limits = self._settings
            self._trials = GrammarTrials(timeout_s=limits.compile_timeout_s, max_bytes=limits.max_compile_bytes)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        default_bytes = threading.stack_size(STACK_BYTES)  # the first grammar starts the thread
        try:
            return self._thread.submit(self._compile, grammar, self._trials)
        finally:
            threading.stack_size(default_bytes)

    def _forget_oldest(self) -> None:
        over = len(self._compiled) - self._settings.cached_grammars
        done = (grammar for grammar, future in self._compiled.items() if future.done())
        for grammar in [grammar for grammar, _ in zip(done, range(over), strict=False)]:
            del self._compiled[grammar]

    def _compile(self, grammar: Grammar, trials: GrammarTrials) -> CompiledGrammar:
        size, most = len(grammar.text.encode(errors="surrogatepass")), self._settings.max_grammar_bytes
        if size > most:
            limit = "engine.structured_output.max_grammar_bytes"
            raise InvalidRequest(f"has {size} bytes; accepted: at most {most} ({limit})", code="grammar_too_large")
        try:
            definition = trials.definition(grammar)
            return self._first_state(definition)
        except ValueError as error:
            raise InvalidRequest(f"cannot be compiled: {_shortened(str(error))}", code="invalid_grammar") from error
        except (TimeoutError, MemoryError) as error:
            raise InvalidRequest(f"cannot be compiled: {error}", code="grammar_too_complex") from error

    def _first_state(self, definition: str) -> CompiledGrammar:
        tokens = self._tokens()
        first_state, mask = compile_matcher(tokens, definition)
        compiled = CompiledGrammar(first_state, vocab_size=self._vocab_size, mask_size=tokens.vocab_size)
        matcher = compiled.new_matcher(self._eos_token_ids)
        _, (fault,) = unpack(np.frombuffer(mask, dtype=np.int32)[None], [matcher])
        if fault is not None:
            raise ValueError("nothing can be written by it")
        return compiled

    def _tokens(self) -> LLTokenizer:
        if self._vocabulary is None:
            vocabulary = ModelVocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            self._vocabulary = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids)
        return self._vocabulary


def _may_pass(compiled: Future[CompiledGrammar]) -> bool:
    """Whether to try again: it was cancelled, or failed for no fault of the grammar's."""
    if compiled.cancelled():
        return True
    return compiled.done() and not isinstance(compiled.exception(), InvalidRequest | None)


def _shortened(reason: str) -> str:
    """The first lines of a reason, cut: the library quotes the grammar, in lines of any length."""
    lines = [line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "..." for line in reason.splitlines()]
    return "\n".join(lines[:MAX_LINES])


class ModelVocabulary:
    """What each token of a model writes, and how a text is tokenised, in the attributes that llguidance reads.

    Special tokens and ids without a meaning write nothing. A model without an end of sequence gets one behind its
    vocabulary, which nothing ever chooses.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = sorted(eos_token_ids) or [vocab_size]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.tokens += [b"<end>"] * (self.eos_token_ids[-1] + 1 - vocab_size)
        self.special_token_ids = sorted({*tokenizer.special_token_ids, *self.eos_token_ids})
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = None
        special = frozenset(self.special_token_ids)
        self._written = [b"" if token_id in special else token for token_id, token in enumerate(self.tokens)]
        self._id_of = {token: token_id for token_id, token in enumerate(self._written) if token}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Token ids that write exactly this text: the tokenizer's own if they do (some add a space), else the longest.

        The library forces these tokens where a grammar leaves only one text.
        """
        token_ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        if b"".join(self._written[token_id] for token_id in token_ids) == text:
            return token_ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            found = next((end for end in ends if text[start:end] in self._id_of), None)
            if found is None:
                break  # the library also takes the ids of a part
            token_ids.append(self._id_of[text[start:found]])
            start = found
        return token_ids
