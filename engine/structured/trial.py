"""Compiles each grammar in a child process first, which a bad one may hang, exhaust or kill.

Compiling recurses on the grammar, and some grammars of a few bytes take minutes or gigabytes. The child (`main`) prints
an empty line when it is up; then it reads one grammar a line from stdin, as JSON, and answers with a line: its
definition and what is wrong with it. If it dies or does not answer, that is the answer.

The child imports this module in a limited address space: nothing heavy (numpy, torch) may be imported here.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import TextIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from engine.errors import EngineUnavailable
from engine.structured.grammar import Grammar, form_rules, form_schema, schema_text

READ_BYTES = 1 << 16
START_TIMEOUT_S = 60.0  # it imports little; on a machine that is busy this takes seconds
CHILD = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from engine.structured.trial import main; main(max_bytes=int(sys.argv[1]), timeout_s=int(sys.argv[2]))"
)

# Half of what the engine's thread for grammars has, so that what fits here fits there.
STACK_BYTES = 4 << 20
_TOKEN_ID = re.compile(r"<\[\d+\]>")  # Lark's way to name a token

# Two limits are not the library's. Each sequence has lexer states of its own: 20,000 take 3 to 8 MB, and the library
# would go to 250,000. Where an object begins, a row of the parser has four items for each optional property: with the
# library's 2,000 objects of 500 fail. With 2,000 properties the slowest mask took 0.08 s, with 4,500 0.4 s.
MAX_LEXER_STATES = 20_000
MAX_ITEMS_IN_ROW = 8_200

_TOKEN_FAULT = re.compile(r"unknown special token: .*|Token range end too large: .*|invalid token range: .*")
_TOKEN_RULE = "accepted for a token: <[id]>, one id that the model has, in place of its text, a range or a list"

END = 256
MARK = 257  # stands for every special token that a grammar names


class GrammarTrials:
    """Tries grammars in the child, for one caller at a time; `close` may come from another thread.

    The first grammar starts the child (0.17 s), as does the next after one that it did not survive.
    """

    def __init__(self, *, timeout_s: float, max_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes  # of address space the child may have
        self._child: subprocess.Popen[bytes] | None = None
        self._in_use = threading.Lock()  # around each use of the child's pipes, which must not be closed meanwhile
        self._is_closed = False

    def definition(self, grammar: Grammar) -> str:
        """The definition of a grammar that compiles.

        Raises ValueError with what is wrong with it, TimeoutError or MemoryError if trying it took too long or killed
        the child, EngineUnavailable if it could not be tried, or not to the end, for no fault of its own.
        """
        request = json.dumps((grammar.kind, grammar.text)).encode() + b"\n"
        try:
            with self._in_use:
                defined, fault = json.loads(self._ask(request))
        except TimeoutError as error:
            raise TimeoutError(f"not compiled within {self._timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError) and not self._is_closed:
                raise MemoryError(f"not compiled within {self._max_bytes} bytes and the depth of a stack") from error
            raise EngineUnavailable(f"the process that tries grammars cannot be asked: {error}") from error
        if fault:
            raise ValueError(fault)
        return str(defined)

    def close(self) -> None:
        """End the child for good: neither a grammar that is being tried nor a later one gets an answer."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()  # a caller that waits for its answer stops waiting
        with self._in_use:
            self._drop_child()

    def _drop_child(self) -> None:
        if self._child is not None:
            self._end_child()
            self._child = None

    def _ask(self, request: bytes) -> bytes:
        """The child's answer. An idle child may have died of something else: only a new one's death counts."""
        if self._child is not None:
            try:
                return self._exchange(self._child, request, self._timeout_s)
            except BrokenPipeError:
                if self._is_closed:
                    raise
        return self._exchange(self._start(), request, self._timeout_s)

    def _start(self) -> subprocess.Popen[bytes]:
        path = [entry or os.getcwd() for entry in sys.path]  # the child imports what this process would
        limits = (str(self._max_bytes), str(math.ceil(self._timeout_s)))
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", CHILD, *limits, *path],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's interrupt is not for it; it ends with its stdin
            )
            self._child, self._end_child = child, weakref.finalize(self, _end, child)
            if self._is_closed:  # `close` may not have seen this child
                child.kill()
            self._exchange(child, b"", START_TIMEOUT_S)
        except OSError as error:
            raise EngineUnavailable(f"the process that tries grammars did not start: {error}") from error
        return child

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> bytes:
        """Send a line, read a line. On TimeoutError, or BrokenPipeError if the child died, the child is dropped."""
        try:
            return _exchanged(child, request, time.monotonic() + timeout_s)
        except (OSError, ValueError):
            self._drop_child()
            raise


def _exchanged(child: subprocess.Popen[bytes], request: bytes, deadline_s: float) -> bytes:
    if child.stdin is None or child.stdout is None:
        raise BrokenPipeError("no pipes")
    child.stdin.write(request)  # does not block: the child is reading
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(child.stdout, select.POLLIN)
    answer = b""
    while not answer.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError
        part = os.read(child.stdout.fileno(), READ_BYTES)
        if not part:
            raise BrokenPipeError("the child died")
        answer += part
    return answer


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with child:  # closes its pipes and waits
        pass


def main(*, max_bytes: int, timeout_s: int) -> None:
    """Answer until stdin ends, in an address space of `max_bytes`.

    An alarm ends the process a second after `timeout_s`: the parent would have killed it, so the parent is dead.
    """
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # may be inherited as ignored
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all, args=(sys.stdin, sys.stdout, timeout_s + 1))
    thread.start()
    thread.join()


def _answer_all(requests: TextIO, answers: TextIO, alarm_s: int) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])
    print(file=answers, flush=True)
    for line in requests:
        kind, text = json.loads(line)
        signal.alarm(alarm_s)
        answer = _try(tokenizer, Grammar(kind, text))
        signal.alarm(0)
        print(json.dumps(answer), file=answers, flush=True)


def _try(tokenizer: LLTokenizer, grammar: Grammar) -> tuple[str, str]:
    """The definition, and "" or what is wrong with the grammar."""
    try:
        defined = definition(grammar)
        # The ids of a model's special tokens mean nothing here: one mark is tried for all of them.
        compile_matcher(tokenizer, _TOKEN_ID.sub(f"<[{MARK}]>", defined))
    except (ValueError, RecursionError) as error:  # not MemoryError: it ends the process, which says as much
        return "", str(error)
    return defined, ""


def definition(grammar: Grammar) -> str:
    """The grammar as llguidance reads it, not compiled. Raises ValueError; its text is for the grammar's author."""
    if grammar.kind == "lark":
        return grammar_from("grammar", grammar.text)  # Lark, or GBNF, which is converted
    if grammar.kind in ("json_object", "json_schema"):  # not as a rule: errors would quote all of it
        return LLMatcher.grammar_from_json_schema(schema_text(form_schema(grammar.kind, grammar.text)))
    return LLMatcher.grammar_from_lark(form_rules("start", grammar.kind, grammar.text))


def compile_matcher(tokenizer: LLTokenizer, definition: str) -> tuple[LLMatcher, bytes]:
    """The matcher, and its first mask (a bit a token, in words of 32), which costs the most.

    Raises ValueError with the reason why there is none.
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
    """The library's reason, but for faults of token ids: those speak of a vocabulary that may not be the model's."""
    return _TOKEN_FAULT.sub(_TOKEN_RULE, matcher.get_error().removesuffix("<non-verbose/>").strip())


class ByteVocabulary:
    """What grammars are tried with: every byte as a token, an end and a mark, in attributes that llguidance reads."""

    def __init__(self) -> None:
        self.eos_token_id = END
        self.bos_token_id = None
        self.tokens = [*(bytes([byte]) for byte in range(END)), b"<end>", b"<mark>"]
        self.special_token_ids = [END, MARK]

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of a text."""
        return list(text)
