"""A job in words."""

from __future__ import annotations

from datetime import UTC, datetime

from worker.cli.job_rates import JobRates
from worker.schemas import JobStatus

JOB_COLUMNS = f"{'JOB':40} {'STATUS':12} {'ENDED':>15} {'FAILED':>8} {'PRI':>3} {'TENANT':12} CREATED"


def job_row(job: JobStatus) -> str:
    """One line of a table under JOB_COLUMNS."""
    counts = job.request_counts
    done = f"{counts.finished}/{counts.total}"
    return (
        f"{job.id:40} {job.status.value:12} {done:>15} {counts.failed:>8} {job.priority:>3} {job.tenant:12} "
        f"{_time(job.created_at)}"
    )


def job_details(job: JobStatus) -> str:
    """Everything about one job that a person asks for, a line each."""
    counts, usage = job.request_counts, job.usage
    lines = [
        f"job        {job.id}",
        f"status     {job.status.value}{f': {job.error}' if job.error else ''}",
        f"requests   {counts.total}: {counts.completed} completed, {counts.failed} failed",
        f"shards     {job.shards_done}/{job.shards_total}",
        f"tokens     {usage.input_tokens} in ({usage.cached_tokens} cached), {usage.output_tokens} out"
        + (f" ({usage.resumed_tokens} resumed)" if usage.resumed_tokens else ""),
        f"priority   {job.priority}",
        f"tenant     {job.tenant}",
        *(f"metadata   {key}={value}" for key, value in job.metadata.items()),
        f"created    {_time(job.created_at)}",
    ]
    for label, when in (
        ("deadline", job.expires_at), ("finished", job.finished_at), ("kept until", job.results_expire_at),
    ):  # fmt: skip
        if when is not None:
            lines.append(f"{label:10} {_time(when)}")
    return "\n".join(lines)


def progress_text(job: JobStatus, rates: JobRates) -> str:
    """One line for a job that runs."""
    counts, usage = job.request_counts, job.usage
    hits = usage.cached_tokens / usage.input_tokens if usage.input_tokens else 0.0
    parts = [
        f"{job.status.value} {counts.finished}/{counts.total} ({job.progress:.0%})",
        f"{rates.prompts_per_s:.1f} prompts/s",
        f"{rates.output_tokens_per_s:.0f} tokens/s out",
    ]
    if not job.status.is_terminal:
        parts.append(f"ETA {_left(counts.total - counts.finished, rates.prompts_per_s)}")
    return ", ".join([*parts, f"prefix hits {hits:.0%}", f"{counts.failed} errors"])


def counts_text(job: JobStatus) -> str:
    """What became of a job's requests."""
    counts = job.request_counts
    return f"{job.status.value}: {counts.completed} completed, {counts.failed} failed, of {counts.total} requests"


def _left(num_prompts: int, prompts_per_s: float) -> str:
    if prompts_per_s <= 0:
        return "unknown"
    seconds = round(num_prompts / prompts_per_s)
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours = seconds // 60 % 60, seconds // 3600
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds % 60:02} s"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
