"""A worker process with a fake engine: `python -m tests.support.worker_program '{"slots": 3}' KEY=VALUE ...`"""

from __future__ import annotations

import json
import logging
import sys

from settings import load_settings, parse_assignments
from tests.support.fake_engine import FakeEngine
from worker.process.worker_process import run_worker


def main() -> int:
    """Run a worker whose engine and settings the command line gives."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(levelname)s %(message)s")
    engine_options = json.loads(sys.argv[1])
    effective = load_settings(parse_assignments(sys.argv[2:]), environ={})
    return run_worker(effective, lambda _: FakeEngine(**engine_options))


if __name__ == "__main__":
    sys.exit(main())
