"""Which checkpoints are a decoder's body without its head."""

from __future__ import annotations

from collections.abc import Container


def is_body_alone(names: Container[str]) -> bool:
    """Whether a decoder's tensors are named without `model.`, as a body alone is saved (Qwen3Model): it has no head."""
    return "embed_tokens.weight" in names
