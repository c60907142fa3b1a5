"""OpenVINO GenAI's side: `python -m tests.benchmarks.peers.servers.openvino_server MODEL DTYPE`.

MODEL was exported by `optimum-cli export openvino`; see peers.py.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

from tests.benchmarks.peers.servers.trial_loop import Generate, serve

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
CACHE_GB = 4


def load(model: str, dtype: str) -> tuple[Generate, dict[str, str]]:
    """Continuous batching, prefix caching on."""
    genai, openvino = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 4096
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
    """[1, tokens] int64."""
    return importlib.import_module("numpy").array([prompt], dtype="int64")


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2]))
