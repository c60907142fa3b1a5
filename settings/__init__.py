"""Typed configuration: every knob with its unit, range, default and the place its value came from.

This package is the only one that reads the environment. `load_settings` takes, strongest first: the command line
(`--set engine.max_num_seqs=64`), the environment (`MILLRACE_ENGINE__MAX_NUM_SEQS=64`), `.env`, a TOML profile
(`MILLRACE_PROFILE=fast.toml`), then what the engine derives from the machine and the checkpoint, then the default.

How values are written, wherever they are written as text:

* true or false: `true`, `on`, `yes`, `1` or `false`, `off`, `no`, `0`. There is no other boolean grammar.
* whole number: decimal digits, with `-` in front if negative. No `+`, no `_`, no leading zero, no `.0`.
* number: the same, with an optional fraction and exponent (`30`, `0.5`, `1e-3`). No infinity, no NaN.
* choice: one of the words listed. `none` where a setting may be absent. Words are read in any letter case.
* Nothing is trimmed, and an empty value is never accepted: it is neither "unset" nor `none`.

A TOML profile may write the same text, or TOML's own booleans and numbers. `.env` values are taken as they stand:
`${NAME}` is not replaced, a name may be set once, and names without the prefix belong to others. A relative path is
relative to the working directory; `~` is not expanded.

An unknown name beginning with `MILLRACE_` (in any letter case), an unknown key and a value that is not accepted are
`SettingsError`s of one line, also where a stronger source overrides the value.

The knobs of the engine this project learned from (there prefixed `FERRUM_`, with five boolean grammars, and invalid
numbers silently replaced by the default), and their names here:

    MAX_BATCHED_TOKENS                   engine.max_num_batched_tokens
    PAGED_MAX_SEQS                       engine.max_num_seqs
    KV_CAPACITY                          engine.max_model_len (unset: what model and pool hold, not a silent 512)
    KV_MAX_BLOCKS                        engine.kv_cache.num_blocks, else engine.kv_cache.memory_fraction (CPU) or
                                         engine.gpu_memory_utilization (CUDA)
    PREFIX_CACHE                         engine.prefix_cache.enabled
    MOE_BATCHED, MOE_BATCHED_DECODE      engine.decode.batched
    MOE_BATCH_THRESHOLD                  engine.decode.batch_threshold
    MOE_BUCKETED                         engine.moe.bucketed
    MOE_PREFILL_THRESHOLD                engine.moe.bucketed_min_tokens
    MOE_GRAPH                            engine.cuda_graphs.enabled
    QWEN_UNIFIED_PREFILL                 engine.unified_prefill
    GREEDY_ARGMAX, UNIFIED_GREEDY_ARGMAX engine.greedy_argmax (one switch; results are tagged token or logits)
    QWEN_UNIFIED_TRACE                   engine.trace_steps
    LOG_TOKENS                           engine.trace_tokens
    UNIFIED_LAYER_PROF, DECODE_OP_PROFILE, MOE_PROFILE, RBD_PROF
                                         engine.profile.layers (one profile: every layer)
    UNIFIED_LAYER_PROF_EVERY             engine.profile.every_steps
    UNIFIED_LAYER_PROF_MAX_M             engine.profile.max_tokens
    UNIFIED_LAYER_PROF_MIN_SEQS          engine.profile.min_seqs

Without a meaning here:

    METAL_PAGED_KV                       no Metal backend, and the KV cache is always paged; its knobs are
                                         engine.kv_cache.block_size and engine.kv_cache.num_blocks
    PAGED_KV                             the same: there is no other KV cache to switch to
    FA2_DIRECT_FFI, FA2_DIRECT_FFI_SHIM, FA2_SOURCE
                                         no foreign attention library is loaded
    FA_LAYOUT_VARLEN, USE_VLLM_PAGED_ATTN, VLLM_DECODE_VARLEN, VLLM_VARLEN_TILED_Q4
                                         one KV layout, one set of attention kernels; a second layout doubled KV memory
    VLLM_MOE, MOE_HOST_ROUTE             one expert path, routed on the device: graph capture has nothing to choose
    initial scratch tokens               no scratch is kept: each step allocates what it needs
    DISABLE_CUDA_RUNNER                  no second runner with a KV cache of its own; engine.device chooses
"""

from __future__ import annotations

from settings.catalogue import Settings
from settings.engine import (
    CudaGraphSettings,
    DecodeSettings,
    EngineSettings,
    KVCacheSettings,
    MoeSettings,
    PrefixCacheSettings,
    ProfileSettings,
    StructuredOutputSettings,
)
from settings.entries import Source, parse_assignments
from settings.errors import SettingsError
from settings.limits import LimitSettings
from settings.model import ModelSettings, ReasoningFormat, ToolCallFormat
from settings.observability import LogSettings, MetricsSettings, TracingSettings
from settings.redis import RedisSettings
from settings.resolve import EffectiveSettings, SettingRow, load_settings
from settings.serve import ServeSettings
from settings.worker import WorkerSettings

__all__ = [
    "Settings",
    "EffectiveSettings",
    "SettingRow",
    "Source",
    "SettingsError",
    "load_settings",
    "parse_assignments",
    "ModelSettings",
    "ToolCallFormat",
    "ReasoningFormat",
    "RedisSettings",
    "EngineSettings",
    "KVCacheSettings",
    "PrefixCacheSettings",
    "DecodeSettings",
    "MoeSettings",
    "CudaGraphSettings",
    "StructuredOutputSettings",
    "ProfileSettings",
    "WorkerSettings",
    "LimitSettings",
    "LogSettings",
    "MetricsSettings",
    "TracingSettings",
    "ServeSettings",
]
