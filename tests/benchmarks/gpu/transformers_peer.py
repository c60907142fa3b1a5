"""Compares the engine with transformers on the same device.

Compared are the tokens of a small random checkpoint, and the speed of continuous batching on the same weights and
workload.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.checkpoint.weights import Checkpoint
from engine.engine import Engine
from engine.request import Request, RequestOutput
from engine.sampling_params import SamplingParams
from tests.benchmarks.gpu.workload import Deadline, GpuSizes, GpuWorkload
from tests.support.engines import load_engine
from tests.support.tiny_checkpoint import VOCAB_SIZE, make_checkpoint
from tests.support.tiny_families import Family

# Sizes that the kernels are made for: heads of 128, groups of 4 query heads.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "initializer_range": 0.08,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
CASES: tuple[tuple[Family, dict[str, Any]], ...] = (("qwen3", SHAPE), ("qwen3_moe", SHAPE | EXPERTS))
DTYPES = ("float32", "bfloat16")

# No more than the prompts below take: all else would be compiled and captured for nothing.
FEW_ROWS = {"engine.max_num_seqs": "16", "engine.max_num_batched_tokens": "512"}

SHARED_TOKENS = 64
NUM_LOGPROBS = 20
FLOAT32_TOLERANCE = 2e-3  # of a log-probability: sums of 250 keys in another order; TF32 would be off by 1e-2
TIE = 2e-3  # logits of the reference closer than this: rounding may choose
# In bfloat16 no error bound is known. Ours may be transformers' own error on the same tokens, times this and plus that.
TIMES_THEIRS = 1.5
MORE_THAN_THEIRS = 0.005


@dataclass(frozen=True)
class Parity:
    """How our tokens of one checkpoint in one dtype compare with transformers in float32 on the same tokens."""

    family: str
    dtype: str
    num_tokens: int
    same_tokens: float  # share of those that the reference chooses, ties included
    their_same_tokens: float  # the same of transformers in this type
    max_error: float  # of log-probabilities: the 20 likeliest of each position
    mean_error: float
    their_mean_error: float

    @property
    def holds(self) -> bool:
        """In float32: every token the same and every log-probability within the tolerance. In bfloat16: as close as
        transformers in bfloat16.
        """
        if self.dtype == "float32":
            return self.same_tokens == 1.0 and self.max_error <= FLOAT32_TOLERANCE
        is_close = self.mean_error <= TIMES_THEIRS * self.their_mean_error + MORE_THAN_THEIRS
        return is_close and self.same_tokens >= self.their_same_tokens - 0.1

    def __str__(self) -> str:
        theirs = f", transformers {self.their_mean_error:.1e}" if self.dtype != "float32" else ""
        return (
            f"{self.family} {self.dtype}: {'same' if self.holds else 'DIFFERS'}; {self.num_tokens} tokens, "
            f"{100 * self.same_tokens:.1f} % the reference's; log-probabilities off by {self.mean_error:.1e}{theirs}, "
            f"at most {self.max_error:.1e}"
        )


def check_parity(family: Family, shape: dict[str, Any], dtype: str, sizes: GpuSizes, device: torch.device) -> Parity:
    """Make a checkpoint and compare what both generate."""
    with tempfile.TemporaryDirectory(prefix="millrace-parity-") as folder:
        path = make_checkpoint(Path(folder), family, dtype=dtype, **shape)
        engine = load_engine(path, {"engine.device": device.type, "engine.dtype": dtype, **FEW_ROWS})
        outputs = _generate(engine, sizes)
        unknown_ids = engine.tokenizer.unknown_ids(VOCAB_SIZE)
        engine.close()
        reference = _Reference(path, torch.float32, device, unknown_ids)
        theirs = reference if dtype == "float32" else _Reference(path, torch.bfloat16, device, unknown_ids)
        return _compare((family, dtype), outputs, reference, theirs)


class _Reference:
    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, unknown_ids: tuple[int, ...]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)
        self._device = device
        self._unknown_ids = list(unknown_ids)

    @torch.inference_mode()
    def positions(self, prompt: tuple[int, ...], generated: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the tokens that may be chosen, and log-probabilities of all: [generated, V] float32 on the host."""
        ids = torch.tensor([[*prompt, *generated[:-1]]], device=self._device)
        logits = self._model(ids).logits[0, len(prompt) - 1 :].float().cpu()
        log_probabilities = torch.log_softmax(logits, dim=-1)
        logits[:, self._unknown_ids] = -torch.inf
        return logits, log_probabilities


def _prompts(sizes: GpuSizes) -> list[tuple[int, ...]]:
    generator = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(256) for _ in range(count)]

    shared = tokens(SHARED_TOKENS)
    return [*(tuple(tokens(length)) for length in sizes.parity_prompts), (*shared, *tokens(7)), (*shared, *tokens(30))]


def _generate(engine: Engine, sizes: GpuSizes) -> list[tuple[tuple[int, ...], RequestOutput]]:
    params = SamplingParams(max_tokens=sizes.parity_tokens, temperature=0.0, ignore_eos=True, logprobs=NUM_LOGPROBS)
    prompts = _prompts(sizes)
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), prompt, params))
    outputs: dict[str, RequestOutput] = {}
    deadline = Deadline(120.0)
    while engine.has_unfinished():
        deadline.check()
        outputs.update((output.request_id, output) for output in engine.step())
    for output in outputs.values():
        if output.error is not None:
            raise output.error
    return [(prompt, outputs[str(number)]) for number, prompt in enumerate(prompts)]


def _compare(
    case: tuple[str, str],
    outputs: list[tuple[tuple[int, ...], RequestOutput]],
    reference: _Reference,
    theirs: _Reference,
) -> Parity:
    same: list[bool] = []
    their_same: list[bool] = []
    errors: list[float] = []
    their_errors: list[float] = []
    for prompt, output in outputs:
        completion = output.completions[0]
        logits, expected = reference.positions(prompt, completion.token_ids)
        their_logits, their_found = theirs.positions(prompt, completion.token_ids)
        for step, ours in enumerate(completion.logprobs or ()):
            best = float(logits[step].max())
            same.append(best - float(logits[step, ours.token_id]) <= TIE)
            their_same.append(best - float(logits[step, int(their_logits[step].argmax())]) <= TIE)
            errors += [abs(value - float(expected[step, token_id])) for token_id, value in ours.top]
            their_errors += [abs(float(their_found[step, i] - expected[step, i])) for i, _ in ours.top]
    count = len(same)
    return Parity(
        *case,
        num_tokens=count,
        same_tokens=sum(same) / count,
        their_same_tokens=sum(their_same) / count,
        max_error=max(errors),
        mean_error=sum(errors) / len(errors),
        their_mean_error=sum(their_errors) / len(their_errors),
    )


def run_transformers(
    config: Mapping[str, object], checkpoint: Checkpoint, load: GpuWorkload, device: torch.device, sizes: GpuSizes
) -> PeerFigures:
    """Time transformers on a workload, greedily, which costs it less than the workload's temperature would.

    Start-up and its own warm-up are left out. It is stopped after `sizes.peer_s` seconds; what it generated until then
    counts. Raises RuntimeError if it has no continuous batching or its loop dies.
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
    """Run the requests; the number of tokens of each that finished in time."""
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
    """The workload hints that transformers' own `generate_batch` would give."""
    from transformers.generation.continuous_batching.utils import WorkloadHints  # not public: may be gone elsewhere

    return WorkloadHints(
        max_prompt_length=max(map(len, load.prompts)),
        max_generated_length=max(load.max_tokens),
        num_requests=len(load.prompts),
    )


def _running_tokens(manager: Any) -> int:
    """Tokens of the requests that had not finished; 0 if this version keeps them elsewhere."""
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


@dataclass(frozen=True)
class PeerFigures:
    """What transformers generated in the time it had."""

    version: str
    attention: str
    seconds: float
    output_tokens: int
    finished_requests: int
    num_requests: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.output_tokens / self.seconds
