"""How much work may be outstanding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from settings import LimitSettings


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much may be outstanding, for all and for each tenant. None: no limit."""

    max_prompts: int | None = None
    max_bytes: int | None = None
    max_jobs: int | None = None
    max_tenant_prompts: int | None = None
    max_tenant_bytes: int | None = None
    max_tenant_jobs: int | None = None

    @classmethod
    def from_settings(cls, limits: LimitSettings) -> Self:
        """What the settings say."""
        return cls(
            max_prompts=limits.max_open_prompts,
            max_bytes=limits.max_open_bytes,
            max_jobs=limits.max_open_jobs,
            max_tenant_prompts=limits.max_tenant_prompts,
            max_tenant_bytes=limits.max_tenant_bytes,
            max_tenant_jobs=limits.max_tenant_jobs,
        )

    def for_script(self) -> Iterator[dict[str, str | int]]:
        """The limits that are set, as submit.lua reads them."""
        for scope, resource, most in (
            ("all", "prompts", self.max_prompts),
            ("all", "bytes", self.max_bytes),
            ("all", "jobs", self.max_jobs),
            ("tenant", "prompts", self.max_tenant_prompts),
            ("tenant", "bytes", self.max_tenant_bytes),
            ("tenant", "jobs", self.max_tenant_jobs),
        ):
            if most is not None:
                yield {"scope": scope, "resource": resource, "most": most}
