"""Whether a request's `model` means the model that a worker serves."""

from __future__ import annotations


def names_model(name: str, served: str) -> bool:
    """A hub name such as Qwen/Qwen3-0.6B also means the directory Qwen3-0.6B."""
    return served in (name, name.rpartition("/")[2])
