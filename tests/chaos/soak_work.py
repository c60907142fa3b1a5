"""What a soak has its workers do, and what must come of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.chaos.undisturbed import Record, contents
from tests.support.demo_tickets import CHECKPOINT, GOAL, ticket_lines
from tests.support.millrace import millrace
from tests.support.records import read_records
from worker.demo.tickets import GradedAnswers, Ticket, make_tickets

MAX_TOKENS = 12
NUM_DIFFERENT = 40  # jobs; the others ask the same again, so that the undisturbed run does not take as long as the soak
TOPICS = tuple(f"You are assistant number {number}, and you answer the question of the user. " for number in range(8))


class SoakWork:
    """Jobs on the demo's model: half of the lines are tickets, answered greedily by schema, the others seeded texts."""

    def __init__(self, directory: Path, num_jobs: int, num_prompts: int) -> None:
        asked = make_tickets(seed=3, held_out=True)
        different = [[next(asked) for _ in range(0, num_prompts, 2)] for _ in range(min(num_jobs, NUM_DIFFERENT))]
        self.tickets: dict[str, Ticket] = {}
        self.jobs: list[list[Mapping[str, Any]]] = []
        for job in range(num_jobs):
            kind = job % NUM_DIFFERENT
            tickets = {f"{job}-{2 * number}": ticket for number, ticket in enumerate(different[kind])}
            self.tickets |= tickets
            texts = [_text_line(job, kind, number) for number in range(1, num_prompts, 2)]
            self.jobs.append([*ticket_lines(tickets), *texts])
        self.engine_settings = {
            "model.path": str(CHECKPOINT),
            "engine.device": "cpu",
            "engine.dtype": "float32",
            "engine.num_threads": "1",
            "engine.max_num_seqs": "32",
            "engine.kv_cache.num_blocks": "600",
            "engine.deterministic": "true",
        }
        self._directory = directory

    def undisturbed(self) -> dict[str, Record]:
        """The contents of every job's records by custom_id, from one `millrace run`.

        Raises RuntimeError unless that run's tickets are answered right: what is compared with it then means something.
        """
        source, target = self._directory / "all.jsonl", self._directory / "undisturbed.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for job in self.jobs[:NUM_DIFFERENT] for line in job))
        options = [word for name, value in self.engine_settings.items() for word in ("--set", f"{name}={value}")]
        done = millrace("run", "-i", source, "-o", target, *options, timeout_s=600)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        found = contents(read_records(target))
        graded = GradedAnswers.of_records(
            {name: self.tickets[name] for name in found.keys() & self.tickets}, found.values()
        )
        if graded.accuracy < GOAL:
            raise RuntimeError(
                f"{graded.num_exact} of {graded.num_tickets} tickets are answered right: {graded.wrong[:3]}"
            )
        return {
            line["custom_id"]: {**found[f"{job % NUM_DIFFERENT}-{number}"], "custom_id": line["custom_id"]}
            for job, lines in enumerate(self.jobs)
            for line in lines
            for number in [line["custom_id"].partition("-")[2]]
        }


def _text_line(job: int, kind: int, number: int) -> Mapping[str, Any]:
    body = {
        "prompt": f"{TOPICS[kind % len(TOPICS)]}Question {number} of kind {kind}?",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 1000 * kind + number,
    }
    return {"custom_id": f"{job}-{number}", "method": "POST", "url": "/v1/completions", "body": body}
