"""Serves trials, one process a side: `python -m tests.benchmarks.peers.servers SIDE MODEL ...`.

Loads once, then runs a trial for each line of standard input. Only the standard library is imported at the top: the
peers' processes run this in environments of their own. OpenVINO's MODEL was exported by `optimum-cli export openvino`.

A line: {"prompts": [[token id, ..], ..], "max_tokens": N}. First answer, when loaded: {"about": {..}}; then for each
line {"seconds": S, "outputs": [[token id, ..], ..]}, outputs in the order of the prompts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypedDict

Generate = Callable[[list[list[int]], int], list[list[int]]]

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
CACHE_GB = 4


class TrialAnswer(TypedDict):
    """The time and the tokens of a trial."""

    seconds: float  # of `generate` alone
    outputs: list[list[int]]


def serve(load: Callable[[], tuple[Generate, dict[str, str]]]) -> None:
    """Answer trials until standard input ends. `load` returns what runs a trial, and its versions and dtypes."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print to standard output: from here on that is standard error
    os.dup2(2, 1)
    generate, about = load()
    _answer(answers.write, {"about": about})
    answers.flush()
    for line in sys.stdin:
        trial = json.loads(line)
        start = time.perf_counter()
        outputs = generate(trial["prompts"], trial["max_tokens"])
        answer: TrialAnswer = {"seconds": time.perf_counter() - start, "outputs": outputs}
        _answer(answers.write, answer)
        answers.flush()


def _answer(write: Callable[[str], object], value: object) -> None:
    write(json.dumps(value) + "\n")


def load_millrace(model: str, assignments: Sequence[str]) -> tuple[Generate, dict[str, str]]:
    """Load our engine as an offline caller has it: with the defaults but for the assignments."""
    import torch

    from engine.request import Request
    from engine.sampling_params import SamplingParams
    from settings import load_settings, parse_assignments
    from tests.support.engines import load_decoder_engine

    values = {"model.path": model, "engine.device": "cpu", **parse_assignments(list(assignments))}
    engine = load_decoder_engine(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add_request(Request(str(number), tuple(prompt), params))
        outputs: dict[str, list[int]] = {}
        while engine.has_unfinished():
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                outputs[output.request_id] = list(output.completions[0].token_ids)
        return [outputs[str(number)] for number in range(len(prompts))]

    settings = engine.settings.engine
    quantization = getattr(settings, "quantization", "none")
    dtype = settings.dtype if quantization == "none" else f"{settings.dtype} with {quantization} weights"
    return generate, {"engine": f"Millrace, torch {torch.__version__}", "dtype": dtype}


def load_vllm(model: str, dtype: str, max_num_seqs: int, max_model_len: int) -> tuple[Generate, dict[str, str]]:
    """Load vLLM, compiled (the default and the fastest), with prefix caching. It does not detokenise; we do."""
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=True,
        max_num_batched_tokens=max(4096, max_model_len),
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    torch = metadata.version("torch")
    return generate, {"engine": f"vLLM {vllm.__version__}, compiled, torch {torch}", "dtype": dtype}


def load_transformers(
    model: str, dtype: str, _max_num_seqs: int, _max_model_len: int
) -> tuple[Generate, dict[str, str]]:
    """Load transformers; `generate` takes one rectangular batch, so the prompts must be equally long."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        outputs = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [list(row) for row in outputs[:, ids.shape[1] :].tolist()]

    about = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return generate, {"engine": about, "dtype": dtype}


def load_openvino(model: str, dtype: str, max_num_seqs: int, max_model_len: int) -> tuple[Generate, dict[str, str]]:
    """Load OpenVINO GenAI with continuous batching and prefix caching."""
    genai, openvino = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = max_num_seqs
    scheduler.max_num_batched_tokens = max(4096, max_model_len)
    precision = PRECISIONS[dtype]
    properties = {"INFERENCE_PRECISION_HINT": precision}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(_row(prompt)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]

    about = f"OpenVINO GenAI {metadata.version('openvino-genai')}, OpenVINO {metadata.version('openvino')}"
    return generate, {"engine": about, "dtype": precision}


def _row(prompt: list[int]) -> object:
    """The tokens as an int64 array [1, tokens]."""
    return importlib.import_module("numpy").array([prompt], dtype="int64")


def main(arguments: Sequence[str]) -> None:
    """Serve the side. Arguments: SIDE MODEL, then assignments if it is ours, else dtype, requests at once, length."""
    side, model, *rest = arguments
    peers = {"vllm": load_vllm, "transformers": load_transformers, "openvino": load_openvino}
    if side == "millrace":
        serve(lambda: load_millrace(model, rest))
    else:
        dtype, max_num_seqs, max_model_len = rest
        serve(lambda: peers[side](model, dtype, int(max_num_seqs), int(max_model_len)))


if __name__ == "__main__":
    main(sys.argv[1:])
