"""`millrace worker` with a count of its tokens: `python -m tests.chaos.resume_worker COUNT_FILE KEY=VALUE ...`"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from settings import EffectiveSettings, load_settings, parse_assignments
from tests.chaos.counted_engine import CountedEngine
from tests.support.engines import load_decoder_engine
from worker.celery_worker import run_worker
from worker.requests.step_engine import StepEngine


def main() -> int:
    """Run a worker with the model and settings of the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(levelname)s %(message)s")

    def load(effective: EffectiveSettings) -> StepEngine:
        engine: StepEngine = CountedEngine(load_decoder_engine(effective), Path(sys.argv[1]))
        return engine

    return run_worker(load_settings(parse_assignments(sys.argv[2:]), environ={}), load)


if __name__ == "__main__":
    sys.exit(main())
