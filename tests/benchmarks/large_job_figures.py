"""What one large job cost."""

from __future__ import annotations

from dataclasses import dataclass

Memory = tuple[float, float]  # MiB of resident memory: before the job, and at most


@dataclass(frozen=True)
class LargeJobFigures:
    """One run. Times in seconds, on a clock on the wall."""

    num_lines: int
    input_bytes: int
    output_bytes: int
    accepted_s: float  # from the first line read to the job's acceptance
    planned_s: float  # from there to the job's shards
    run_s: float  # from there to the last record, by an engine that answers at once
    downloaded_s: float
    producer_mib: Memory
    planner_mib: Memory  # of the worker, until its plan was done
    worker_mib: Memory  # the same until the job was done
    reader_mib: Memory
    redis_peak_mib: float  # lines and records

    def as_table(self) -> str:
        """A Markdown table, a row for each phase."""
        rows = [
            ("accepted", self.accepted_s, self.input_bytes, "producer", self.producer_mib),
            ("planned", self.planned_s, self.input_bytes, "worker", self.planner_mib),
            ("run", self.run_s, self.input_bytes, "worker", self.worker_mib),
            ("downloaded", self.downloaded_s, self.output_bytes, "reader", self.reader_mib),
        ]
        lines = ["| what | s | lines/s | MB/s | RSS before -> peak |", "|---|---:|---:|---:|---|"]
        for what, seconds, num_bytes, who, (before, peak) in rows:
            rates = f"{self.num_lines / seconds:,.0f} | {num_bytes / seconds / 1e6:.1f}"
            lines.append(f"| {what} | {seconds:.2f} | {rates} | {who} {before:.0f} -> {peak:.0f} MiB |")
        sizes = f"{self.input_bytes / 1e6:.0f} MB in, {self.output_bytes / 1e6:.0f} MB out"
        return "\n".join([f"{self.num_lines:,} lines, {sizes}; Redis at most {self.redis_peak_mib:.0f} MiB", *lines])
