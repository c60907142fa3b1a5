"""The HTTP server of `millrace serve`: the group `serve`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from settings.fields import Accepted, Bytes, Seconds, SettingsGroup, Unit, WholeSeconds
from settings.observability import check_host


class ServeSettings(SettingsGroup):
    """OpenAI's Files and Batches API over HTTP. Any number of servers may share one Redis."""

    host: Annotated[str, Accepted("an address or name of this machine"), AfterValidator(check_host)] = Field(
        default="127.0.0.1",
        description="Address to serve on. Any but this machine's own needs a key (`millrace keys create`).",
    )
    port: int = Field(default=8000, ge=1, le=65_535, description="Port to serve on.")
    max_connections: Annotated[int, Unit("connections")] = Field(
        default=1000, ge=1, le=1_000_000, description="Most open connections; requests on further ones get a 503."
    )
    max_uploads: Annotated[int, Unit("uploads")] = Field(
        default=16,
        ge=1,
        le=10_000,
        description="Most uploads at once, half of them one tenant's; further ones get a 429.",
    )
    max_downloads: Annotated[int, Unit("downloads")] = Field(
        default=64,
        ge=1,
        le=10_000,
        description="Most downloads of files at once, half of them one tenant's; further ones get a 429.",
    )
    max_streams: Annotated[int, Unit("pages")] = Field(
        default=64,
        ge=1,
        le=10_000,
        description="Most pages that are live at once, half of them one tenant's; further ones stay as they were "
        "loaded.",
    )
    upload_timeout_s: WholeSeconds = Field(
        default=3600, ge=1, le=86_400, description="Longest time that an upload may take as a whole."
    )
    read_timeout_s: Seconds = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="Longest wait for the next part of a body, for the headers of a request as a whole, and for a "
        "client to take more of an answer.",
    )
    file_ttl_s: WholeSeconds = Field(
        default=86_400,
        ge=1,
        le=31_536_000,
        description="How long an uploaded file is kept that says nothing else itself (expires_after).",
    )
    max_tenant_files: Annotated[int, Unit("files")] = Field(
        default=1000, ge=1, le=10_000, description="Most uploaded files of one tenant; then uploads are refused."
    )
    max_tenant_file_bytes: Bytes = Field(
        default=4_294_967_296,
        ge=1,
        le=1_099_511_627_776,
        description="Most bytes of one tenant's uploaded files in Redis; then uploads are refused.",
    )
