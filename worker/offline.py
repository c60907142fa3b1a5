"""Runs a file of request lines through an engine in this process: no Redis, no job.

Lines are read ahead on a thread of their own, in the file's order or sorted by what their prompts begin with.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from tempfile import SpooledTemporaryFile

from engine.errors import EngineError, EngineFatal, InvalidRequest
from engine.request import AnyRequest, RequestOutput
from settings import LimitSettings, ModelSettings
from worker.lines.errors import LineError
from worker.lines.files import CustomIds
from worker.lines.parse import parse_request_line
from worker.lines.request_line import PrefixKey, RequestLine, prefix_sort_key
from worker.records.record import has_failed
from worker.requests.served_model import Prepared, ServedModel, Unrunnable
from worker.requests.step_engine import StepEngine, request_room

# Stands in the record ids where a job's id would; before a digest of the input where that can be read again.
JOB_ID = "run"
# The longest wait for a line between two steps of the engine.
BUSY_WAIT_S = 0.001
BUILT_TOGETHER = 32  # lines at most: their texts are tokenised together
IDLE_WAIT_S = 0.1  # how soon a request to stop is seen while the input is silent

# Lines sorted together: their keys take up to 60 MB, and some 4 s of parsing come before the first of them runs.
MAX_SORTED_LINES = 50_000
# They wait in a temporary file: a packed input, or one that comes in parts, cannot be read twice.
MAX_SORTED_BYTES = 256 * 1024 * 1024
BYTES_IN_MEMORY = 16 * 1024 * 1024  # a smaller temporary file stays in memory

Line = RequestLine | LineError
Wanted = Callable[[int], bool]


def every_line(_index: int) -> bool:
    """Whether to run the line of this index (0-based): yes."""
    return True


@dataclass(slots=True)
class RunSummary:
    """Figures of an offline run; the fields are the keys of `millrace run --summary`."""

    load_s: float = 0.0  # loading the model and warming it up
    elapsed_s: float = 0.0  # from the first line read to the last record written, without loading
    requests: int = 0  # records written, failed ones included
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    output_tokens: int = 0
    ignored_params: Mapping[str, int] = field(default_factory=dict)  # of --ignore-param, with the lines that had each


class OfflineRun:
    """Keeps a bounded window of requests in the engine and writes each record as soon as it exists."""

    def __init__(
        self,
        engine: StepEngine,
        model: ModelSettings,
        *,
        window: int,
        write: Callable[[Mapping[str, object]], None],
        job_id: str = JOB_ID,
        created_s: int | None = None,
    ) -> None:
        """`model`: which one `engine` runs; `created_s`: Unix time of the records, None for now.

        Raises SettingsError for a model.path that is not under model.root.
        """
        self._engine = engine
        self._window = window  # sequences in the engine at once: enough to order by prefix, not a whole file
        self._write_record = write
        created_s = int(time.time()) if created_s is None else created_s
        self._job = ServedModel(engine, model).job(job_id, created_s=created_s)
        self._built: deque[Prepared] = deque()  # next to go into the engine
        self._room_taken = 0
        self._running: dict[str, tuple[RequestLine, int]] = {}  # with the room it takes
        self._summary = RunSummary()
        self._started_s = time.monotonic()

    def run(self, feed: LineFeed, should_stop: Callable[[], bool], on_progress: Callable[[], None]) -> None:
        """Run every line of `feed`, or until `should_stop`; what is unfinished then gets no record.

        If the engine breaks, the requests in it get an error record each, the lines after them none, and EngineError
        is raised. Raises what reading the input raised.
        """
        try:
            while not should_stop():
                self._admit(feed)
                if self._engine.has_unfinished():
                    for output in self._engine.step():
                        self._finish(output)
                elif feed.ended:
                    return
                on_progress()
        except EngineError as error:
            for line, _ in self._running.values():
                self._record(self._job.of_error(line, error))
            self._running.clear()
            raise

    def summary(self, load_s: float) -> RunSummary:
        """The figures so far."""
        return replace(self._summary, load_s=load_s, elapsed_s=time.monotonic() - self._started_s)

    def _admit(self, feed: LineFeed) -> None:
        while self._room_taken < self._window:
            if self._built:
                self._add(*self._built.popleft())
                continue
            lines = feed.take(BUILT_TOGETHER, BUSY_WAIT_S if self._running else IDLE_WAIT_S)
            if not lines:
                return
            self._build(lines)

    def _build(self, lines: Sequence[Line]) -> None:
        for item in self._job.prepare(lines, lambda line: str(line.index)):
            if isinstance(item, Unrunnable):
                self._record(item.record)
            else:
                self._built.append(item)

    def _add(self, line: RequestLine, request: AnyRequest) -> None:
        room = request_room(request)
        self._running[request.request_id] = line, room
        self._room_taken += room
        try:
            self._engine.add_request(request)
        except InvalidRequest as error:
            self._record(self._job.of_error(self._take_out(request.request_id), error))

    def _take_out(self, request_id: str) -> RequestLine:
        line, room = self._running.pop(request_id)
        self._room_taken -= room
        return line

    def _finish(self, output: RequestOutput) -> None:
        if output.request_id not in self._running:
            raise EngineFatal(f"the engine returned {output.request_id!r}, which is not running")
        line = self._take_out(output.request_id)
        self._summary.prompt_tokens += output.num_prompt_tokens
        self._summary.cached_tokens += output.num_cached_tokens
        self._summary.output_tokens += sum(len(completion.token_ids) for completion in output.completions)
        record, _ = self._job.of_output(line, output)
        self._record(record)

    def _record(self, record: Mapping[str, object]) -> None:
        self._summary.requests += 1
        self._summary.failed += has_failed(record)
        self._write_record(record)


class LineFeed:
    """Reads raw lines on a thread of its own, so that a slow producer on a pipe never stalls the engine.

    `by_prefix` sorts them, see in_prefix_order: for files that are complete; a pipe is taken as it comes. Lines that
    `is_wanted` denies are left out, and count among those before a line all the same. At most `capacity` lines wait in
    it, and, sorting, the keys of up to MAX_SORTED_LINES. The thread is a daemon: a read from a terminal or a pipe
    cannot be interrupted, and closing a file under a read waits for it.
    """

    def __init__(
        self,
        raw_lines: Iterable[bytes],
        limits: LimitSettings,
        *,
        capacity: int,
        by_prefix: bool,
        is_wanted: Wanted = every_line,
    ) -> None:
        self._raw_lines = raw_lines
        self._order = in_prefix_order if by_prefix else in_file_order
        self._limits = limits
        self._is_wanted = is_wanted
        self._lines: queue.Queue[Line | None] = queue.Queue(maxsize=capacity)  # None: the end
        self._error: Exception | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="line-feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the last line was taken."""
        return self._ended

    def take(self, max_lines: int, wait_s: float) -> list[Line]:
        """The next lines; none if none comes within `wait_s` seconds. After the last, raises what reading raised."""
        lines: list[Line] = []
        while len(lines) < max_lines and not self._ended:
            try:
                line = self._lines.get_nowait() if lines else self._lines.get(timeout=wait_s)
            except queue.Empty:
                break
            if line is None:
                self._ended = True
            else:
                lines.append(line)
        if not lines and self._ended and self._error is not None:
            raise self._error
        return lines

    def _read(self) -> None:
        try:
            for line in self._order(self._raw_lines, self._limits, is_wanted=self._is_wanted):
                self._lines.put(line)
        except Exception as error:  # a seam: the end of the lines must come in any case
            self._error = error  # raised where the lines are taken
        self._lines.put(None)


def in_file_order(
    raw_lines: Iterable[bytes], limits: LimitSettings, *, is_wanted: Wanted = every_line
) -> Iterator[Line]:
    """Each line as it comes, or what is wrong with it. Raises what reading the lines raises."""
    custom_ids = CustomIds()
    for index, raw in enumerate(raw_lines):
        line = _parse(raw, index, limits, custom_ids)  # also one that is left out: its custom_id is taken
        if is_wanted(index):
            yield line


def in_prefix_order(
    raw_lines: Iterable[bytes],
    limits: LimitSettings,
    max_sorted: int = MAX_SORTED_LINES,
    max_sorted_bytes: int = MAX_SORTED_BYTES,
    is_wanted: Wanted = every_line,
) -> Iterator[Line]:
    """The lines, sorted by how their prompts begin, as many together as the two bounds allow; bad ones first.

    Memory does not grow with the input. Raises what reading raises, and OSError where a temporary file has no room.
    """
    custom_ids = CustomIds()
    numbered = enumerate(raw_lines)
    while (first := next(numbered, None)) is not None:
        with SpooledTemporaryFile(BYTES_IN_MEMORY) as spool:
            keys: list[tuple[PrefixKey, int, int, int]] = []  # key, index, place, bytes
            place = 0
            for index, raw in chain((first,), islice(numbered, max_sorted - 1)):
                line = _parse(raw, index, limits, custom_ids)
                if not is_wanted(index):
                    continue
                if isinstance(line, LineError):
                    yield line
                    continue
                spool.write(raw)
                keys.append((prefix_sort_key(line.prompt_key()), index, place, len(raw)))
                place += len(raw)
                if place >= max_sorted_bytes:
                    break
            keys.sort()
            for _, index, place, size in keys:
                spool.seek(place)
                yield _parse(spool.read(size), index, limits, None)


def _parse(raw: bytes, index: int, limits: LimitSettings, custom_ids: CustomIds | None) -> Line:
    """`custom_ids`: those of the lines before it; None for a line that was checked against them."""
    try:
        line = parse_request_line(raw, index, limits)
        if custom_ids is not None:
            custom_ids.add(line)
    except LineError as error:
        return error
    return line
