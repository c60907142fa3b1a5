"""What one shard's lines become: requests, then records."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from engine.any_request import AnyRequest
from engine.errors import EngineError, EngineFatal
from engine.request_output import RequestOutput
from settings import LimitSettings
from worker.lines.line_error import LineError
from worker.lines.parse_request_line import parse_request_line
from worker.lines.request_line import RequestLine
from worker.records.encode_record import encode_record, has_failed
from worker.records.error_record import line_error_record
from worker.records.reasoning_tokens import reasoning_tokens
from worker.records.record_context import RecordContext
from worker.records.token_spelling import TokenSpelling
from worker.registry.claim import Claim
from worker.registry.outcome import Outcome
from worker.registry.prompt_record import PromptRecord
from worker.requests.record_builder import RecordBuilder
from worker.requests.request_builder import RequestBuilder

Prepared = tuple[RequestLine, AnyRequest]

logger = logging.getLogger(__name__)


class ShardPrompts:
    """Parses, prepares and records the prompts of one claimed shard. Touches neither Redis nor the engine."""

    def __init__(
        self,
        claim: Claim,
        requests: RequestBuilder,
        spelling: TokenSpelling,
        *,
        model_name: str,
        limits: LimitSettings,
    ) -> None:
        self._claim = claim
        self._requests = requests
        self._limits = limits
        self._context = RecordContext(claim.ref.job_id, model_name, claim.created_s)
        self._records = RecordBuilder(spelling, self._context, requests.answers, requests.echoes)

    def prepare(self, raw_lines: Iterable[tuple[int, bytes | None]]) -> list[Prepared | PromptRecord]:
        """For each (index, raw line): what to run, or the record that says why that cannot be run.

        None is a line that is not in Redis any more. Many together are cheaper than one at a time, see
        RequestBuilder.build_all.
        """
        parsed = [self._parsed(index, raw) for index, raw in raw_lines]
        lines = [(line, self._request_id(line)) for line in parsed if isinstance(line, RequestLine)]
        built = iter(self._requests.build_all(lines, tenant=self._claim.tenant))
        return [self._prepared(item, next(built)) if isinstance(item, RequestLine) else item for item in parsed]

    def of_output(self, line: RequestLine, output: RequestOutput) -> PromptRecord:
        """The record of a request that ended."""
        record = self._records.of_output(line, output)
        return PromptRecord(
            line.index,
            Outcome.ERROR if has_failed(record) else Outcome.OK,
            encode_record(record),
            prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            output_tokens=sum(len(completion.token_ids) for completion in output.completions),
            resumed_tokens=output.num_resumed_tokens if output.completions else 0,
            reasoning_tokens=reasoning_tokens(record),
        )

    def of_line_error(self, error: LineError) -> PromptRecord:
        """The record of a line that is no request."""
        return PromptRecord(error.index, Outcome.ERROR, encode_record(line_error_record(error, self._context)))

    def of_engine_error(self, line: RequestLine, error: EngineError) -> PromptRecord:
        """The record of a request that could not be made."""
        return PromptRecord(line.index, Outcome.ERROR, encode_record(self._records.of_error(line, error)))

    def of_unexpected(self, line: RequestLine, error: Exception) -> PromptRecord:
        """The record of a request over which our own code failed; the details are in the log."""
        return self.of_engine_error(line, EngineFatal(f"preparing the request failed ({type(error).__name__})"))

    def _parsed(self, index: int, raw: bytes | None) -> RequestLine | PromptRecord:
        try:
            if raw is None:
                raise LineError("the line is missing from the job's input", code="missing_line", index=index)
            return parse_request_line(raw, index, self._limits)
        except LineError as error:
            return self.of_line_error(error)

    def _prepared(self, line: RequestLine, request: AnyRequest | Exception) -> Prepared | PromptRecord:
        if not isinstance(request, Exception):
            return line, request
        if isinstance(request, EngineError):
            return self.of_engine_error(line, request)
        logger.error("prompt %d of %s could not be prepared", line.index, self._claim.ref, exc_info=request)
        return self.of_unexpected(line, request)

    def _request_id(self, line: RequestLine) -> str:
        # With the claim's own uuid in it: this process may run a prompt again while the engine still ends the earlier
        # try. The number before it would not do: it begins again when the job is submitted again after a FLUSHALL.
        claim = self._claim
        return f"{claim.ref.job_id}/{line.index}/{claim.ref.unit}.{claim.token.rpartition(':')[2]}"
