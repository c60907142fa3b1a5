"""vLLM's side: `python -m tests.benchmarks.peers.servers.vllm_server MODEL DTYPE`, in vLLM's environment."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

from tests.benchmarks.peers.servers.trial_loop import Generate, serve

MAX_MODEL_LEN = 2048


def load(model: str, dtype: str) -> tuple[Generate, dict[str, str]]:
    """Compiled (the default and the fastest), prefix caching on. Its answers are not detokenised; ours are."""
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        enable_prefix_caching=True,
        max_num_batched_tokens=4096,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    torch = metadata.version("torch")
    return generate, {"engine": f"vLLM {vllm.__version__}, compiled, torch {torch}", "dtype": dtype}


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2]))
