"""`python -m tests.compose [TRANSCRIPT]`: compose.yaml with real containers, told as it happens."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.compose.transcript import Transcript
from tests.compose.walk import walk

if __name__ == "__main__":
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        files = [stack.enter_context(Path(name).open("w")) for name in sys.argv[1:2]]
        walk(directory, Transcript(sys.stdout, *files))
