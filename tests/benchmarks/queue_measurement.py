"""What one run through the queue cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueMeasurement:
    """One run: `num_jobs` jobs, one a worker, accepted at the same moment. CPU times are of all threads, in seconds."""

    num_workers: int
    num_prompts: int  # of all jobs together
    planning_s: float  # from acceptance until the last job was planned
    total_s: float  # from acceptance to the last record, planning included
    worker_cpu_s: float  # all workers, planning included
    redis_cpu_s: float  # while the workers ran
    submit_cpu_s: float  # the producer's
    submit_redis_cpu_s: float
    results_cpu_s: float  # of reading all results back

    @property
    def prompts_per_s_per_worker(self) -> float:
        """Planning included."""
        return self.num_prompts / self.total_s / self.num_workers

    @property
    def shards_per_s_per_worker(self) -> float:
        """After planning, in prompts a second."""
        return self.num_prompts / (self.total_s - self.planning_s) / self.num_workers

    def us_per_prompt(self, seconds: float) -> float:
        """Microseconds a prompt."""
        return seconds / self.num_prompts * 1e6
