"""A worker process with a fake engine: `python -m tests.support.worker_program '{"slots": 3}' KEY=VALUE ...`"""

from __future__ import annotations

import json
import sys

from settings import load_settings, parse_assignments
from tests.support.fake_engine import FakeEngine
from worker.celery_worker import run_worker
from worker.runtime.log_setup import configure_logging


def main() -> int:
    """Run a worker whose engine and settings the command line gives."""
    engine_options = json.loads(sys.argv[1])
    effective = load_settings(parse_assignments(sys.argv[2:]), environ={})
    configure_logging(effective.settings.log)
    return run_worker(effective, lambda _: FakeEngine(**engine_options))


if __name__ == "__main__":
    sys.exit(main())
