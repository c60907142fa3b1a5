"""The record of a prompt whose result Redis refused."""

from __future__ import annotations

import dataclasses
import json

from worker.records.encode_record import encode_record
from worker.records.error_record import error_record
from worker.records.failure import Failure
from worker.records.record_context import RecordContext
from worker.registry.claim import Claim
from worker.registry.outcome import Outcome
from worker.registry.prompt_record import PromptRecord

_REFUSED = Failure.of_server("The request was executed, but its result could not be stored.", code="result_refused")


def refused_record(claim: Claim, refused: PromptRecord) -> PromptRecord:
    """An error record in place of `refused`, small and always the same; the tokens it cost stay counted."""
    context = RecordContext(claim.ref.job_id, "", claim.created_s)
    record = error_record(_REFUSED, refused.index, json.loads(refused.record).get("custom_id"), context)
    return dataclasses.replace(refused, outcome=Outcome.ERROR, record=encode_record(record))
