"""How the engine runs a model: the group `engine` and the groups in it."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from settings.errors import FieldOrderError
from settings.fields import (
    Accepted,
    Blocks,
    Bytes,
    Seconds,
    Sequences,
    SettingsGroup,
    Steps,
    Tokens,
    Unit,
    read_whole_number,
)

_MAX_SIZE = 65_536
_SIZES_FORMS = f"whole numbers from 1 to {_MAX_SIZE}, rising, with commas between: 1,2,4,8"


def _check_sizes(text: str) -> str:
    sizes = _read_sizes(text)
    if not all(low < high for low, high in pairwise((0, *sizes, _MAX_SIZE + 1))):
        raise ValueError("not rising, or out of range")
    return text


class CudaGraphSettings(SettingsGroup):
    """Capture of decode steps as CUDA graphs."""

    enabled: bool | None = Field(
        default=None,
        description="Capture decode steps as CUDA graphs at start and replay them; none: on a GPU, without "
        "engine.deterministic.",
    )
    batch_sizes: Annotated[str, Accepted(_SIZES_FORMS), AfterValidator(_check_sizes)] | None = Field(
        default=None,
        description="Numbers of sequences that steps are captured for, others being padded to the next; larger steps "
        "are not captured. none: 1, 2, 4, every 8 to 64, every 16 to 256, every 32 to 512, up to engine.max_num_seqs.",
    )

    chunk_tokens: Tokens = Field(
        default=2048,
        ge=0,
        le=1_048_576,
        description="Steps with up to so many tokens of prompts are captured too, in sizes of half octaves from 256 "
        "on: larger ones keep the GPU busy for longer than their launches take, but for small models, whose steps are "
        "captured up to 2^33 / hidden_size^2 tokens where nothing is set. 0: none.",
    )

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """`batch_sizes` as numbers."""
        return None if self.batch_sizes is None else _read_sizes(self.batch_sizes)


class DecodeSettings(SettingsGroup):
    """How decode steps run."""

    batched: bool = Field(
        default=True, description="Decode many sequences in one forward pass; off: one after the other, to compare."
    )
    batch_threshold: Sequences = Field(
        default=2, ge=1, le=65_536, description="Fewest sequences that are decoded in one forward pass."
    )


def _check_power_of_two(value: int) -> int:
    if value & (value - 1) != 0:
        raise ValueError("not a power of two")
    return value


class KVCacheSettings(SettingsGroup):
    """Size of the block pool. There is no other kind of KV cache than the paged one."""

    dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="Number format of keys and values; auto: engine.dtype, whatever the checkpoint says. fp8: e4m3, "
        "half the memory of bfloat16, so twice the tokens fit, with a scale a layer and KV head: the checkpoint's "
        "(k_scale, v_scale), 1 where it has none. CUDA only, from compute capability 8.9 on.",
    )
    block_size: Annotated[Tokens, Accepted("a power of two, 8 to 256"), AfterValidator(_check_power_of_two)] = Field(
        default=16, ge=8, le=256, description="Tokens in one block of the KV cache."
    )
    num_blocks: Blocks | None = Field(
        default=None,
        ge=2,
        le=2**31 - 1,
        description="Blocks in the pool, the null block included; none: on a CPU derived from memory_fraction, on CUDA "
        "what engine.gpu_memory_utilization leaves, measured at start.",
    )
    memory_fraction: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Part of the memory left free by the weights that the pool takes, where num_blocks is none. "
        "CPU only.",
    )


class MoeSettings(SettingsGroup):
    """How mixture-of-experts layers run."""

    bucketed: bool = Field(
        default=True,
        description="Sort tokens by expert and multiply once per expert; off: token by token, to compare. Native "
        "products of bfloat16 sort them either way.",
    )
    bucketed_min_tokens: Tokens = Field(
        default=4,
        ge=1,
        le=1_048_576,
        description="Fewest tokens in a step that are sorted by expert; native products of bfloat16 sort any number.",
    )


class PrefixCacheSettings(SettingsGroup):
    """Reuse of KV blocks between requests that begin alike."""

    enabled: bool = Field(default=True, description="Requests that begin alike share the KV blocks of the beginning.")


class ProfileSettings(SettingsGroup):
    """Which steps are profiled: timed layer by layer (`layers`), or traced (`millrace run --profile FILE`).

    Timing synchronises the device and a trace takes memory and disk, so both are off unless asked for.
    """

    layers: bool = Field(default=False, description="Log the time of each layer of selected steps.")
    every_steps: Steps = Field(
        default=16, ge=1, le=1_000_000_000, description="Select one step in so many, beginning with the warm-up."
    )
    max_tokens: Tokens | None = Field(
        default=None, ge=1, le=1_048_576, description="Select only steps with at most so many tokens; none: any."
    )
    min_seqs: Sequences | None = Field(
        default=None, ge=1, le=65_536, description="Select only steps with at least so many sequences; none: any."
    )
    max_steps: Steps = Field(
        default=16, ge=1, le=1_000_000, description="Most steps that the trace of millrace run --profile holds."
    )

    def selects(self, step: int, num_tokens: int, num_seqs: int) -> bool:
        """Whether step number `step` (from 0), with `num_tokens` tokens of `num_seqs` sequences, is selected."""
        if step % self.every_steps != 0:
            return False
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            return False
        return self.min_seqs is None or num_seqs >= self.min_seqs


class SharedPrefixSettings(SettingsGroup):
    """Attention over beginnings that running requests share."""

    enabled: bool | None = Field(
        default=None,
        description="Requests that run together over the same KV blocks attend to them once for all, where that is "
        "faster; none: on a CPU, without engine.deterministic.",
    )


class SpeculationSettings(SettingsGroup):
    """Drafts by prompt lookup: what followed the last tokens where they occurred before, verified in one step."""

    enabled: bool = Field(
        default=False,
        description="Draft a sequence's next tokens by what followed its last ones earlier in prompt or output, and "
        "verify all in one step. Tokens stay the same; outputs that copy take fewer steps. Not with "
        "engine.async_scheduling.",
    )
    ngram_min: Tokens = Field(default=2, ge=1, le=64, description="Fewest last tokens that are looked up.")
    ngram_max: Tokens = Field(default=4, ge=1, le=64, description="Most last tokens that are looked up, tried first.")
    max_draft_tokens: Tokens = Field(
        default=8,
        ge=1,
        le=64,
        description="Most tokens drafted for a sequence in a step: fewer after drafts that failed, and all steps' "
        "drafts and sequences together at most engine.max_num_seqs.",
    )

    @model_validator(mode="after")
    def _some_number_is_looked_up(self) -> SpeculationSettings:
        if self.ngram_min > self.ngram_max:
            raise FieldOrderError("ngram_min", "ngram_max")
        return self


class StructuredOutputSettings(SettingsGroup):
    """What a request's grammar may cost; one that costs more fails its request alone."""

    max_grammar_bytes: Bytes = Field(
        default=65_536, ge=1, le=16_777_216, description="Largest grammar: text of its schema, expression or rules."
    )
    compile_timeout_s: Seconds = Field(
        default=5.0, ge=0.1, le=600, description="Longest time in which a grammar may be compiled."
    )
    max_compile_bytes: Bytes = Field(
        default=536_870_912,
        ge=134_217_728,
        le=1_099_511_627_776,
        description="Most memory in which a grammar may be compiled: address space of the process that tries it.",
    )
    cached_grammars: Annotated[int, Unit("grammars")] = Field(
        default=256, ge=1, le=65_536, description="Compiled grammars that are kept; the least recently used go first."
    )


class EngineSettings(SettingsGroup):
    """How the engine runs a model. `auto` and none are filled in by the engine from machine and checkpoint."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto: cuda where there is a usable GPU, else cpu."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and KV cache; auto: the checkpoint's, or float32 where the CPU only emulates it.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        default="none",
        description="Rounds an unquantised checkpoint as it is loaded. int8: weights of 8 bits per output channel, "
        "activations of 8 bits per token, CPUs with AVX-512 VNNI only; int4: weights of 4 bits in groups of 128, "
        "activations as they are. Embedding, norms, routers and KV cache keep engine.dtype. millrace doctor "
        "--quantization-error measures the error.",
    )
    native_kernels: Literal["auto", "off", "base", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"] = Field(
        default="auto",
        description="Operations in C++ for one of these instruction sets, built when millrace is installed where there "
        "is a compiler; auto: the fastest this CPU has from AVX2 on; off: PyTorch alone, as on a GPU and with "
        "engine.deterministic or engine.quantization=int8. amx_emulated is for tests.",
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
        "request, is one. Not set, a GPU of 16 GiB and more has 256, of 100 GiB and more 512.",
    )
    max_num_batched_tokens: Tokens = Field(
        default=2048,
        ge=1,
        le=1_048_576,
        description="Most tokens in one step; longer prompts are prefilled in chunks. Not set, a GPU of 16 GiB and "
        "more has 8192.",
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
        description="Tokens a sequence generates between resume states of its request in Redis; none: keeps none.",
    )
    deterministic: bool = Field(
        default=False,
        description="A request's tokens do not depend, bit for bit, on what runs beside it, on chunks, prefix hits or "
        "preemption, at the same num_threads on the same machine; slower, CPU only.",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="Schedule a step while the device runs the one before it; none: on a GPU, unless "
        "engine.decode.batched is off or engine.speculation.enabled on, which have the host wait. A CPU gains nothing.",
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
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
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


def _read_sizes(text: str) -> tuple[int, ...]:
    return tuple(read_whole_number(part) for part in text.split(","))
