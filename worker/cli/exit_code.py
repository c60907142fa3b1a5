"""What the process's exit code says."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `millrace`."""

    DONE = 0  # lines may have failed: their errors are in the output
    FAILED = 1  # the job failed, expired or was cancelled, or Redis or the model cannot be had
    USAGE = 2  # bad usage or settings
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT, as shells have it
    # A worker whose engine broke or hung exits with os.EX_SOFTWARE, 70.
