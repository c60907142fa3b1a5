"""transformers' side: `python -m tests.benchmarks.peers.servers.transformers_server MODEL DTYPE`."""

from __future__ import annotations

import sys

import torch
import transformers

from tests.benchmarks.peers.servers.trial_loop import Generate, serve


def load(model: str, dtype: str) -> tuple[Generate, dict[str, str]]:
    """`generate` on one rectangular batch: the prompts must be equally long."""
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


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2]))
