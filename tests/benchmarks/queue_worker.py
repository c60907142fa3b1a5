"""A worker process with an InstantEngine: `python -m tests.benchmarks.queue_worker TOKENIZER_DIR KEY=VALUE ...`"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.text.tokenizer import Tokenizer
from settings import load_settings, parse_assignments
from tests.benchmarks.instant_engine import InstantEngine
from worker.celery_worker import run_worker
from worker.runtime.log_setup import configure_logging


def main() -> int:
    """Run until a signal; the exit code."""
    effective = load_settings(parse_assignments(sys.argv[2:]), environ={})
    configure_logging(effective.settings.log)
    return run_worker(effective, lambda _: InstantEngine(Tokenizer.from_directory(Path(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
