"""transformers' continuous batching on the same weights and the same workload."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import transformers

from engine.checkpoint.files import Checkpoint
from tests.benchmarks.gpu.gpu_sizes import GpuSizes
from tests.benchmarks.gpu.gpu_workload import GpuWorkload
from tests.benchmarks.gpu.peer_figures import PeerFigures


def run_transformers(
    config: Mapping[str, object], checkpoint: Checkpoint, load: GpuWorkload, device: torch.device, sizes: GpuSizes
) -> PeerFigures:
    """Start-up and its own warm-up are left out; greedy, which costs it less than the workload's temperature.

    Stopped after `sizes.peer_s` seconds: what was generated until then counts. Raises RuntimeError where it has no
    continuous batching or its loop dies.
    """
    model = _model(config, checkpoint, device)
    if not hasattr(model, "continuous_batching_context_manager"):
        raise RuntimeError(f"transformers {transformers.__version__} has no continuous batching")
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = transformers.ContinuousBatchingConfig(num_blocks=sizes.peer_blocks)
    with model.continuous_batching_context_manager(
        generation, timeout=10.0, continuous_batching_config=settings, workload_hints=_hints(load)
    ) as manager:
        attention = str(model.config._attn_implementation)
        try:
            begin = time.perf_counter()
            finished = _run(manager, load, begin + sizes.peer_s)
            seconds = time.perf_counter() - begin
            running = _running_tokens(manager)
        finally:  # its thread would go on with what is left, beside what is measured next
            manager.stop(block=True, timeout=10.0, hard_stop=True)
    return PeerFigures(
        version=transformers.__version__,
        attention=attention,
        seconds=seconds,
        output_tokens=sum(finished.values()) + running,
        finished_requests=len(finished),
        num_requests=len(load.prompts),
    )


def _run(manager: Any, load: GpuWorkload, end: float) -> dict[str, int]:
    """Tokens of each request that finished in time."""
    for number, (prompt, count) in enumerate(zip(load.prompts, load.max_tokens, strict=True)):
        manager.add_request(list(prompt), request_id=str(number), max_new_tokens=count)
    finished: dict[str, int] = {}
    while len(finished) < len(load.prompts) and time.perf_counter() < end:
        result = manager.get_result(timeout=0.5)
        if result is None and not manager.is_running():
            raise RuntimeError(f"its loop ended: {manager.background_thread_status.fatal_error}")
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            finished[result.request_id] = len(result.generated_tokens)
    return finished


def _hints(load: GpuWorkload) -> Any:
    """What its own `generate_batch` would tell it."""
    from transformers.generation.continuous_batching.utils import WorkloadHints  # not public: may be gone elsewhere

    return WorkloadHints(
        max_prompt_length=max(map(len, load.prompts)),
        max_generated_length=max(load.max_tokens),
        num_requests=len(load.prompts),
    )


def _running_tokens(manager: Any) -> int:
    """Of the requests it had not finished; 0 where this version keeps them elsewhere."""
    with suppress(AttributeError, RuntimeError):  # the loop's thread changes the table meanwhile
        states = list(manager.batch_processor.scheduler.active_requests.values())
        return sum(len(state.generated_tokens) for state in states)
    return 0


def _model(config: Mapping[str, object], checkpoint: Checkpoint, device: torch.device) -> Any:
    known = transformers.AutoConfig.for_model(**config)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    # Not model.to(dtype), which would round the rotary frequencies too.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = checkpoint.read(name)
    return model.eval()
