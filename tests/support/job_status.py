"""A job's status for tests that have no job."""

from __future__ import annotations

from worker.schemas import JobState, JobStatus, JobUsage, RequestCounts


def job_status(
    status: JobState, completed: int = 0, failed: int = 0, error: str | None = None, *, output_tokens: int = 7
) -> JobStatus:
    """Of ten prompts; a quarter of their tokens came from the prefix cache."""
    return JobStatus(
        id="s0-1",
        status=status,
        created_at=0.0,
        request_counts=RequestCounts(total=10, completed=completed, failed=failed),
        usage=JobUsage(
            input_tokens=100, cached_tokens=25, output_tokens=output_tokens, total_tokens=100 + output_tokens
        ),
        shards_total=1,
        shards_done=0,
        priority=5,
        tenant="default",
        metadata={},
        error=error,
    )
