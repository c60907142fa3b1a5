"""Celery's worker, as far as it speaks."""

from __future__ import annotations

from celery.apps.worker import Worker, install_worker_term_handler

from worker.broker.untyped import Untyped


class QuietWorker(Worker):  # type: ignore[misc]  # celery has no types
    """Says nothing past the log when SIGTERM comes: our runtime logs that it stops.

    Celery writes `worker: Warm shutdown (MainProcess)` between two line ends right to the descriptor, which in a
    container is the one thing in its log that is no JSON. What it says to Ctrl-C is for whoever sits there, and stays.
    """

    def install_platform_tweaks(self, worker: Untyped) -> None:
        """Signal handlers."""
        super().install_platform_tweaks(worker)
        install_worker_term_handler(worker, verbose=False)
