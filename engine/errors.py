"""Every error the engine raises.

EngineError
|-- InvalidRequest            the request's own fault: permanent, never retried
|   |-- PromptTooLong         it could never fit: need and capacity in tokens
|   `-- GrammarFailed         its grammar allows no further output
|-- EngineUnavailable         transient: the same request may succeed later
|   `-- KVPoolExhausted       need and free in blocks
|-- CheckpointError           the model on disk cannot be run as it stands
|-- CapabilityError           a setting asks for what this device or build cannot do
|-- NonFiniteLogits           the model answered NaN or infinity for one item
`-- EngineFatal               the engine's state can no longer be trusted: stop it
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors of the engine."""


class InvalidRequest(EngineError):
    """A request that can never be served, with the parameter at fault, its value and what is accepted."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        value: object = None,
        accepted: str | None = None,
        code: str = "invalid_value",
    ) -> None:
        super().__init__(message)
        self.param = param
        self.value = value
        self.accepted = accepted
        self.code = code


class PromptTooLong(InvalidRequest):
    """Prompt and requested output together exceed what one request may hold."""

    def __init__(self, need: int, capacity: int, *, param: str = "max_tokens") -> None:
        super().__init__(
            f"needs {need} tokens of context (prompt and output), this engine holds {capacity} for one request",
            param=param,
            value=need,
            accepted=f"at most {capacity} tokens",
            code="context_length_exceeded",
        )
        self.need = need
        self.capacity = capacity


class GrammarFailed(InvalidRequest):
    """A sequence's grammar allows no further output, or finding that out took more than a limit."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the output could not be held to its grammar: {reason}", code="grammar_failed")


class EngineUnavailable(EngineError):
    """The engine cannot serve this now, but perhaps later."""


class KVPoolExhausted(EngineUnavailable):
    """The block pool has fewer free blocks than an allocation needs. Nothing was allocated."""

    def __init__(self, need: int, free: int) -> None:
        super().__init__(
            f"needs {need} KV blocks, {free} are free; raise engine.kv_cache.num_blocks or lower engine.max_num_seqs"
        )
        self.need = need
        self.free = free


class CheckpointError(EngineError):
    """The checkpoint cannot be run as it stands; the message names the file, key or tensor."""


class CapabilityError(EngineError):
    """A setting asks for something this device or build cannot do; the message names the setting."""


class NonFiniteLogits(EngineError):
    """The model's logits for one item hold NaN or +infinity; its batch mates are not affected."""


class EngineFatal(EngineError):
    """An invariant is broken; the engine must be stopped and its requests run elsewhere."""
