"""The process that tries grammars.

An empty line on stdout says that it is up; then one grammar a line on stdin, as JSON, and one answer a line: a pair of
the definition and of what is wrong with it. If it dies over a grammar or does not answer, that is the answer: compiling
recurses on the grammar, and some grammars of a few bytes take minutes or gigabytes.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import threading
from typing import TextIO

from llguidance import LLTokenizer, TokenizerWrapper

from engine.structured.byte_vocabulary import MARK, ByteVocabulary
from engine.structured.compile_matcher import compile_matcher
from engine.structured.definition import definition
from engine.structured.grammar import Grammar

# Half of what the engine's thread for grammars has: what fits here fits there.
STACK_BYTES = 4 << 20
_TOKEN_ID = re.compile(r"<\[\d+\]>")  # Lark's way to name a token


def main(*, max_bytes: int, timeout_s: int) -> None:
    """Answer until stdin ends, in an address space of `max_bytes`. A grammar that takes over a second more than
    `timeout_s` ends the process: whoever asked was to kill it before, and must be dead.
    """
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it may have been inherited as ignored
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
    except (ValueError, RecursionError) as error:  # MemoryError ends the process, which says as much
        return "", str(error)
    return defined, ""
