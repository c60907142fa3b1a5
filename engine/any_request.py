"""Whatever an engine can be asked for."""

from __future__ import annotations

from engine.embedding_request import EmbeddingRequest
from engine.request import Request

AnyRequest = Request | EmbeddingRequest
