"""Runs a worker whose engine answers every request in the step after it came.

`python -m tests.benchmarks.queue_worker TOKENIZER_DIR KEY=VALUE ...`
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.request import AnyRequest, Completion, FinishReason, Request, RequestOutput, ResumeState
from engine.stats import EngineStats
from engine.text.tokenizer import Tokenizer
from settings import load_settings, parse_assignments
from tests.support.fake_engine import engine_stats
from worker.celery_worker import run_worker
from worker.runtime.log_setup import configure_logging

MAX_MODEL_LEN = 4096
NUM_OUTPUT_TOKENS = 16
ANSWER = " the answer and you are the one that is a"  # 41 characters


class InstantEngine:
    """A StepEngine without a model, owned by the worker's EngineThread like the real one.

    Skipped: the engine's own checks of a request, scheduling, KV blocks, the model, sampling, stop strings,
    detokenising, log-probabilities. Real: the tokenizer. Every answer is the same text of 16 tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = MAX_MODEL_LEN
        self.generates = True
        self.classifier: ClassifierConfig | None = None
        self.makes_comparable_embeddings = False
        self._open: dict[str, Request] = {}
        completion = Completion(0, ANSWER, tuple(range(NUM_OUTPUT_TOKENS)), FinishReason.LENGTH, None, None)
        self._completions = (completion,)
        self._stats = engine_stats()
        self.step_size = (0, 0)

    def add_request(self, request: AnyRequest) -> None:
        assert isinstance(request, Request)
        self._open[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        raise RuntimeError(f"{request_id} is to be aborted: a benchmark cancels nothing")

    def resume_state(self, request_id: str) -> ResumeState | None:
        return None  # its answers come whole

    def due_resume_states(self) -> dict[str, ResumeState]:
        return {}

    def step(self) -> list[RequestOutput]:
        requests, self._open = self._open, {}
        return [
            RequestOutput(request.request_id, len(request.prompt_token_ids), 0, self._completions)
            for request in requests.values()
        ]

    def has_unfinished(self) -> bool:
        return bool(self._open)

    def stats(self) -> EngineStats:
        return self._stats

    def close(self) -> None:
        self._open.clear()


def main() -> int:
    """Run until a signal. Returns the exit code."""
    effective = load_settings(parse_assignments(sys.argv[2:]), environ={})
    configure_logging(effective.settings.log)
    return run_worker(effective, lambda _: InstantEngine(Tokenizer.from_directory(Path(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
