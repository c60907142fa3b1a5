"""How fast a job goes."""

from __future__ import annotations

from collections import deque

from worker.schemas import JobStatus

WINDOW_S = 15.0  # long enough for some steps of long answers, short enough to show that a worker came or went


class JobRates:
    """Prompts and tokens a second over the last quarter of a minute, from what the job's status said meanwhile."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()  # when, prompts, output tokens

    def add(self, job: JobStatus, now_s: float) -> None:
        """What the job's status says at `now_s`, seconds of a clock that only rises."""
        self._seen.append((now_s, job.request_counts.finished, job.usage.output_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def prompts_per_s(self) -> float:
        """Records a second, those of failed prompts too; 0 before the second status."""
        return self._per_s(1)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second, counted when their prompt's record is written."""
        return self._per_s(2)

    def _per_s(self, field: int) -> float:
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        return (last[field] - first[field]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
