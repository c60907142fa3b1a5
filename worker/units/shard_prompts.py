"""What one shard's lines become: requests, then records."""

from __future__ import annotations

from engine.errors import EngineError, EngineFatal
from engine.request import Request
from engine.request_output import RequestOutput
from settings import LimitSettings
from worker.lines.line_error import LineError
from worker.lines.parse_request_line import parse_request_line
from worker.lines.request_line import RequestLine
from worker.records.encode_record import encode_record, has_failed
from worker.records.error_record import line_error_record
from worker.records.record_context import RecordContext
from worker.records.token_spelling import TokenSpelling
from worker.registry.claim import Claim
from worker.registry.outcome import Outcome
from worker.registry.prompt_record import PromptRecord
from worker.requests.record_builder import RecordBuilder
from worker.requests.request_builder import RequestBuilder


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
        self._records = RecordBuilder(spelling, self._context)

    def parse(self, index: int, raw: bytes | None) -> RequestLine:
        """Line `index`. Raises LineError, also for a line that is not in Redis any more."""
        if raw is None:
            raise LineError("the line is missing from the job's input", code="missing_line", index=index)
        return parse_request_line(raw, index, self._limits)

    def request(self, line: RequestLine) -> Request:
        """The engine's request for `line`. Raises InvalidRequest."""
        claim = self._claim
        # With the claim's own uuid in it: this process may run a prompt again while the engine still ends the earlier
        # try. The number before it would not do: it begins again when the job is submitted again after a FLUSHALL.
        claim_id = claim.token.rpartition(":")[2]
        return self._requests.build(
            line,
            f"{claim.ref.job_id}/{line.index}/{claim.ref.unit}.{claim_id}",
            priority=claim.priority,
            cache_salt=claim.tenant,
        )

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
