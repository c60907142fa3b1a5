"""What one shard's lines become: requests, then records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.request import AnyRequest, RequestOutput
from settings import LimitSettings
from worker.lines.line_error import LineError
from worker.lines.parse_request_line import parse_request_line
from worker.lines.request_line import RequestLine
from worker.records.encode_record import encode_record, has_failed
from worker.registry.claim import Claim
from worker.registry.outcome import Outcome
from worker.registry.prompt_record import PromptRecord
from worker.requests.served_model import ServedModel

Prepared = tuple[RequestLine, AnyRequest]


class ShardPrompts:
    """Parses, prepares and records the prompts of one claimed shard. Touches neither Redis nor the engine."""

    def __init__(self, claim: Claim, model: ServedModel, *, limits: LimitSettings) -> None:
        self._claim = claim
        self._requests = model.requests
        self._limits = limits
        self._records = model.records(claim.ref.job_id, created_s=claim.created_s)

    def prepare(self, raw_lines: Iterable[tuple[int, bytes | None]]) -> list[Prepared | PromptRecord]:
        """For each (index, raw line): what to run, or the record that says why that cannot be run.

        None is a line that is not in Redis any more. Many together are cheaper than one at a time, see
        RequestBuilder.build_all.
        """
        parsed = [self._parsed(index, raw) for index, raw in raw_lines]
        lines = [(line, self._request_id(line)) for line in parsed if isinstance(line, RequestLine)]
        built = iter(self._requests.build_all(lines, created_s=self._claim.created_s, tenant=self._claim.tenant))
        return [self._prepared(item, next(built)) if isinstance(item, RequestLine) else item for item in parsed]

    def of_output(self, line: RequestLine, output: RequestOutput) -> PromptRecord:
        """The record of a request that ended."""
        record, num_reasoning_tokens = self._records.of_output(line, output)
        return PromptRecord(
            line.index,
            Outcome.ERROR if has_failed(record) else Outcome.OK,
            encode_record(record),
            prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            output_tokens=sum(len(completion.token_ids) for completion in output.completions),
            resumed_tokens=output.num_resumed_tokens if output.completions else 0,
            reasoning_tokens=num_reasoning_tokens,
        )

    def _parsed(self, index: int, raw: bytes | None) -> RequestLine | PromptRecord:
        try:
            if raw is None:
                raise LineError("the line is missing from the job's input", code="missing_line", index=index)
            return parse_request_line(raw, index, self._limits)
        except LineError as error:
            return _failed(index, self._records.of_line_error(error))

    def _prepared(self, line: RequestLine, request: AnyRequest | Exception) -> Prepared | PromptRecord:
        if not isinstance(request, Exception):
            return line, request
        return _failed(line.index, self._records.of_unbuilt(line, request))

    def _request_id(self, line: RequestLine) -> str:
        # With the claim's own uuid in it: this process may run a prompt again while the engine still ends the earlier
        # try. The number before it would not do: it begins again when the job is submitted again after a FLUSHALL.
        claim = self._claim
        return f"{claim.ref.job_id}/{line.index}/{claim.ref.unit}.{claim.token.rpartition(':')[2]}"


def _failed(index: int, record: Mapping[str, object]) -> PromptRecord:
    return PromptRecord(index, Outcome.ERROR, encode_record(record))
