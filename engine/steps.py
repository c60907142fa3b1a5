"""One step after the other, until one fails."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import EngineFatal
from engine.finished_requests import FinishedRequests
from engine.request_output import RequestOutput


class Steps:
    """Runs an engine's steps. Once one has failed the engine takes no request and runs no step any more."""

    def __init__(self, finished: FinishedRequests) -> None:
        self._finished = finished
        self._failure: EngineFatal | None = None

    @property
    def have_failed(self) -> bool:
        """Whether a step failed; who asks for the next one learns why."""
        return self._failure is not None

    def run(self, advance: Callable[[], None]) -> list[RequestOutput]:
        """Advance; the outputs of the requests that ended since the last call.

        Raises EngineFatal where a step failed with it, now or before: but first what had ended is handed out, so a
        failure that finds something ended is raised by the call after.
        """
        if self._failure is None:
            try:
                advance()
            except EngineFatal as failure:
                self._failure = failure
        if self._finished.is_empty:
            self.check()
        return self._finished.take()

    def check(self) -> None:
        """Raise EngineFatal if a step has failed."""
        if self._failure is not None:
            raise EngineFatal(str(self._failure)) from self._failure
