"""Requests that wait for their grammars."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait

from engine.errors import EngineError, EngineFatal, InvalidRequest
from engine.scheduling.request_group import RequestGroup
from engine.structured.compiled_grammar import CompiledGrammar
from engine.structured.grammar import Grammar
from engine.structured.grammar_compiler import GrammarCompiler

WAIT_S = 0.01  # for a grammar, in a step that has nothing else to do


class HeldGroups:
    """Groups whose grammar is being compiled. They are not scheduled yet; whatever runs goes on meanwhile."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """It closes the compiler."""
        self._compiler = compiler
        self._held: dict[int, tuple[RequestGroup, Future[CompiledGrammar]]] = {}  # by arrival

    @property
    def num_sequences(self) -> int:
        """Sequences that wait here."""
        return sum(len(group.unfinished) for group, _ in self._held.values())

    def hold(self, group: RequestGroup) -> bool:
        """Have its grammar compiled; False for a group that has none, or has ended."""
        grammar = group.request.params.grammar
        if grammar is None or group.is_complete:
            return False
        self._held[group.arrival] = (group, self._compiler.compile(grammar))
        return True

    def promote(self, group: RequestGroup, priority: int) -> bool:
        """Make a group more urgent; False if it is not held."""
        if group.arrival not in self._held:
            return False
        for state in group.states:
            state.priority = priority
        return True

    def release(self, group: RequestGroup) -> bool:
        """Hold it no more; False if it was not held. A grammar that nobody else waits for is not compiled any more,
        unless that has begun.
        """
        _, future = self._held.pop(group.arrival, (None, None))
        if future is None:
            return False
        if not future.done() and all(other is not future for _, other in self._held.values()):
            future.cancel()
        return True

    def take_ready(self, *, may_wait: bool) -> list[tuple[RequestGroup, CompiledGrammar | EngineError]]:
        """Groups that wait no longer, in the order they came, with their grammar or the error it is refused with.

        The refused stay here until they are released.
        """
        if not self._held:
            return []
        if may_wait:
            wait({future for _, future in self._held.values()}, WAIT_S, FIRST_COMPLETED)
        ready = [(group, _outcome(group, future)) for group, future in self._held.values() if future.done()]
        for group, outcome in ready:
            if isinstance(outcome, CompiledGrammar):
                self.release(group)
        return ready

    def close(self) -> None:
        """Give back what compiles grammars."""
        self._compiler.close()


def _outcome(group: RequestGroup, future: Future[CompiledGrammar]) -> CompiledGrammar | EngineError:
    error = future.exception()
    return future.result() if error is None else _error_of(group.request.params.grammar, error)


def _error_of(grammar: Grammar | None, error: BaseException) -> EngineError:
    if isinstance(error, InvalidRequest):
        param = None if grammar is None else grammar.param
        return InvalidRequest(f"{param} {error}", param=param, code=error.code)
    if isinstance(error, EngineError):
        return error
    return EngineFatal(f"compiling a grammar failed: {type(error).__name__}: {error}")
