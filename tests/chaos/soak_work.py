"""What a soak has its workers do, and what must come of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from settings import EngineSettings
from tests.chaos.undisturbed import Record, contents
from tests.support.millrace import millrace
from tests.support.records import read_records
from tests.support.tiny_checkpoint import make_checkpoint

MAX_TOKENS = 12
NUM_DIFFERENT = 40  # jobs; the others ask the same again, so that the undisturbed run does not take as long as the soak
TOPICS = tuple(f"You are assistant number {number}, and you answer the question of the user. " for number in range(8))


class SoakWork:
    """Jobs of lines, half of them greedy and half seeded, on a small checkpoint in `directory`."""

    def __init__(self, directory: Path, num_jobs: int, num_prompts: int) -> None:
        # Weights wide enough apart that no choice of a token hangs on rounding.
        self.model = make_checkpoint(directory / "tiny", "qwen3", initializer_range=0.6)
        self.jobs = [[_line(job, number) for number in range(num_prompts)] for job in range(num_jobs)]
        self.engine_settings = {
            "model.path": str(self.model),
            "engine.device": "cpu",
            "engine.dtype": "float32",
            "engine.num_threads": "1",
            "engine.max_num_seqs": "32",
            "engine.kv_cache.num_blocks": "600",
        }
        if "deterministic" in EngineSettings.model_fields:
            self.engine_settings["engine.deterministic"] = "true"
        self._directory = directory

    def undisturbed(self) -> dict[str, Record]:
        """The contents of every job's records by custom_id, from one `millrace run`."""
        source, target = self._directory / "all.jsonl", self._directory / "undisturbed.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for job in self.jobs[:NUM_DIFFERENT] for line in job))
        options = [word for name, value in self.engine_settings.items() for word in ("--set", f"{name}={value}")]
        done = millrace("run", "-i", source, "-o", target, *options, timeout_s=600)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        found = contents(read_records(target))
        return {
            line["custom_id"]: {**found[f"{job % NUM_DIFFERENT}-{number}"], "custom_id": line["custom_id"]}
            for job, lines in enumerate(self.jobs)
            for number, line in enumerate(lines)
        }


def _line(job: int, number: int) -> Mapping[str, Any]:
    kind = job % NUM_DIFFERENT
    body: dict[str, Any] = {"prompt": f"{TOPICS[kind % len(TOPICS)]}Question {number} of kind {kind}?"}
    body |= {"max_tokens": MAX_TOKENS, "temperature": 0}
    if number % 2:
        body |= {"temperature": 0.9, "top_p": 0.9, "seed": 1000 * kind + number}
    return {"custom_id": f"{job}-{number}", "method": "POST", "url": "/v1/completions", "body": body}
