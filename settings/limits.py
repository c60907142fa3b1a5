"""Limits on one request, on one job and on all that is unfinished: the group `limits`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from settings.errors import FieldOrderError
from settings.fields import (
    HOSTS_FORMS,
    NAMES_FORMS,
    Accepted,
    Bytes,
    Hosts,
    Jobs,
    Names,
    Prompts,
    SettingsGroup,
    Unit,
    read_names,
)


class LimitSettings(SettingsGroup):
    """What a producer may ask for; beyond it a line or a job is refused, never cut."""

    max_prompts_per_job: Prompts = Field(default=50_000, ge=1, le=10_000_000, description="Most lines in one job.")
    max_prompt_bytes: Bytes = Field(default=262_144, ge=1, le=1_073_741_824, description="Largest request line.")
    max_job_bytes: Bytes = Field(
        default=536_870_912, ge=1, le=1_099_511_627_776, description="Largest job: all of its lines together."
    )
    max_json_depth: Annotated[int, Unit("levels")] = Field(
        default=32, ge=1, le=256, description="Deepest nesting of JSON in a request line."
    )
    max_n: Annotated[int, Unit("completions")] = Field(
        default=8, ge=1, le=1024, description="Most completions of one prompt (n)."
    )
    max_stop: Annotated[int, Unit("strings")] = Field(
        default=16, ge=0, le=1024, description="Most stop strings of one request."
    )
    max_logit_bias: Annotated[int, Unit("entries")] = Field(
        default=1024, ge=0, le=1_048_576, description="Most entries in one request's logit_bias."
    )
    max_top_logprobs: Annotated[int, Unit("alternatives")] = Field(
        default=20, ge=0, le=1024, description="Most alternatives reported for one token."
    )
    max_tools: Annotated[int, Unit("tools")] = Field(
        default=128, ge=0, le=4096, description="Most tools of one request; 128 is OpenAI's limit."
    )
    max_embedding_inputs: Annotated[int, Unit("inputs")] = Field(
        default=2048,
        ge=1,
        le=65_536,
        description="Most inputs of one request for embeddings, scores or classes; 2048 is OpenAI's limit.",
    )
    max_open_prompts: Prompts = Field(
        default=1_000_000,
        ge=1,
        le=1_000_000_000,
        description="Most unfinished prompts in Redis; then jobs are refused.",
    )
    max_open_jobs: Jobs = Field(
        default=10_000, ge=1, le=10_000_000, description="Most unfinished jobs in Redis; then jobs are refused."
    )
    max_open_bytes: Bytes = Field(
        default=8_589_934_592,
        ge=1,
        le=1_099_511_627_776,
        description="Most bytes of unfinished jobs' lines in Redis; then jobs are refused.",
    )
    max_tenant_prompts: Prompts | None = Field(
        default=None, ge=1, le=1_000_000_000, description="The same for one tenant's prompts; none: no limit."
    )
    max_tenant_bytes: Bytes | None = Field(
        default=None, ge=1, le=1_099_511_627_776, description="The same for one tenant's bytes; none: no limit."
    )
    max_tenant_jobs: Jobs | None = Field(
        default=None, ge=1, le=10_000_000, description="The same for one tenant's jobs; none: no limit."
    )
    max_tenant_result_bytes: Bytes | None = Field(
        default=None,
        ge=1,
        le=1_099_511_627_776,
        description="Most bytes of records that Redis keeps for one tenant; then its jobs are refused until some are "
        "deleted or forgotten. None: no limit.",
    )
    max_record_bytes: Bytes = Field(
        default=33_554_432,
        ge=4096,
        le=268_435_456,
        description="Largest record of a job; one that would be larger is an error that says what to ask less of.",
    )

    models: Annotated[Names, Accepted(NAMES_FORMS)] | None = Field(
        default=None,
        description="Models that jobs may wait for, beside those that workers serve or served within a week.",
    )

    callback_hosts: Annotated[Hosts, Accepted(HOSTS_FORMS)] | None = Field(
        default=None,
        description="Hosts that a job's on_done may name, by https and at public addresses: host, host:port, or "
        "*.domain. None: no host.",
    )
    callback_private_hosts: Annotated[Hosts, Accepted(HOSTS_FORMS)] | None = Field(
        default=None,
        description="The same for hosts that may have addresses of a private network, and take http. None: no host.",
    )
    callback_queues: Annotated[Names, Accepted(NAMES_FORMS)] | None = Field(
        default=None, description="Queues of Celery that a job's on_done may name, task:NAME@QUEUE. None: no queue."
    )

    @property
    def callback_host_names(self) -> tuple[str, ...]:
        """The names in `callback_hosts`."""
        return read_names(self.callback_hosts)

    @property
    def callback_private_host_names(self) -> tuple[str, ...]:
        """The names in `callback_private_hosts`."""
        return read_names(self.callback_private_hosts)

    @property
    def callback_queue_names(self) -> tuple[str, ...]:
        """The names in `callback_queues`."""
        return read_names(self.callback_queues)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names in `models`."""
        return read_names(self.models)

    @model_validator(mode="after")
    def _the_largest_part_fits_the_whole(self) -> LimitSettings:
        # Without this, a job that can never fit would be refused with a message about load, not about its size.
        if self.max_prompts_per_job > self.max_open_prompts:
            raise FieldOrderError("max_prompts_per_job", "max_open_prompts")
        if self.max_prompt_bytes > self.max_job_bytes:
            raise FieldOrderError("max_prompt_bytes", "max_job_bytes")
        if self.max_job_bytes > self.max_open_bytes:
            raise FieldOrderError("max_job_bytes", "max_open_bytes")
        return self
