"""How the engine runs a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from settings.cuda_graphs import CudaGraphSettings
from settings.decode import DecodeSettings
from settings.errors import FieldOrderError
from settings.group_config import GROUP_CONFIG
from settings.kv_cache import KVCacheSettings
from settings.moe import MoeSettings
from settings.prefix_cache import PrefixCacheSettings
from settings.profile import ProfileSettings
from settings.shared_prefix import SharedPrefixSettings
from settings.structured_output import StructuredOutputSettings
from settings.units import Sequences, Tokens, Unit


class EngineSettings(BaseModel):
    """How the engine runs a model. `auto` and none are filled in by the engine from machine and checkpoint."""

    model_config = GROUP_CONFIG

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto: cuda where there is a usable GPU, else cpu."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and KV cache; auto: the checkpoint's, or float32 where the CPU only emulates it.",
    )
    quantization: Literal["none", "int8"] = Field(
        default="none",
        description="int8: weights of 8 bits per output channel, activations of 8 bits per token; embedding, norms, "
        "routers and KV cache keep engine.dtype. Its error is logged at load. CPUs with AVX-512 VNNI only.",
    )
    max_model_len: Tokens | None = Field(
        default=None,
        ge=2,
        le=16_777_216,
        description="Most tokens one request may have, prompt and output together; none: the model's context, or what "
        "the KV pool holds where that is less.",
    )
    max_num_seqs: Sequences = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Most sequences that run at the same time: each of n completions, each input of an embedding "
        "request, is one.",
    )
    max_num_batched_tokens: Tokens = Field(
        default=2048, ge=1, le=1_048_576, description="Most tokens in one step; longer prompts are prefilled in chunks."
    )
    num_threads: Annotated[int, Unit("threads")] | None = Field(
        default=None, ge=1, le=1024, description="CPU threads for tensor operations; none: one per usable core."
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Part of the GPU's memory that may be in use, other processes' included: what weights, the largest "
        "step and the decode graphs leave of it is the KV pool, where kv_cache.num_blocks is none. CUDA only.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        description="Seed for requests that bring none; none: drawn from the system's entropy.",
    )
    checkpoint_tokens: Tokens | None = Field(
        default=256,
        ge=1,
        le=1_048_576,
        description="Tokens a sequence generates between checkpoints of its request in Redis; none: no checkpoints.",
    )
    deterministic: bool = Field(
        default=False,
        description="A request's tokens do not depend, bit for bit, on what runs beside it, on chunks, prefix hits or "
        "preemption, at the same num_threads on the same machine; slower, CPU only.",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="Schedule a step while the device runs the one before it; none: on a GPU, unless "
        "engine.decode.batched is off, which has the host wait. A CPU gains nothing.",
    )
    deduplicate: bool = Field(
        default=True,
        description="Equal requests of one tenant, greedy or with the same seed, are computed once while one of them "
        "is unfinished.",
    )
    greedy_argmax: bool = Field(
        default=True, description="decode_batch and unified_forward answer greedy tokens; off: logits."
    )
    unified_prefill: bool = Field(
        default=True, description="Prefill and decode share a step; off: each step is only one of the two."
    )
    trace_steps: bool = Field(default=False, description="Log each step's requests, lengths and positions.")
    trace_tokens: bool = Field(default=False, description="Log the best candidates of each row of logits.")
    kv_cache: KVCacheSettings = Field(default_factory=KVCacheSettings)
    prefix_cache: PrefixCacheSettings = Field(default_factory=PrefixCacheSettings)
    shared_prefix: SharedPrefixSettings = Field(default_factory=SharedPrefixSettings)
    decode: DecodeSettings = Field(default_factory=DecodeSettings)
    structured_output: StructuredOutputSettings = Field(default_factory=StructuredOutputSettings)
    moe: MoeSettings = Field(default_factory=MoeSettings)
    cuda_graphs: CudaGraphSettings = Field(default_factory=CudaGraphSettings)
    profile: ProfileSettings = Field(default_factory=ProfileSettings)

    @model_validator(mode="after")
    def _every_running_request_gets_a_token(self) -> EngineSettings:
        # A decode step spends one token per running request; with fewer, some would never advance.
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise FieldOrderError("max_num_seqs", "max_num_batched_tokens")
        return self

    @model_validator(mode="after")
    def _every_captured_size_can_occur(self) -> EngineSettings:
        if max(self.cuda_graphs.sizes or (1,)) > self.max_num_seqs:
            raise FieldOrderError("cuda_graphs.batch_sizes", "max_num_seqs")
        return self
