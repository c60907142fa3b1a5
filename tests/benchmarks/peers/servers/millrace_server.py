"""Our side: `python -m tests.benchmarks.peers.servers.millrace_server MODEL KEY=VALUE ..`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.request import Request
from engine.sampling_params import SamplingParams
from settings import load_settings, parse_assignments
from tests.benchmarks.peers.servers.trial_loop import Generate, serve
from tests.support.engines import load_decoder_engine


def load(model: str, assignments: Sequence[str]) -> tuple[Generate, dict[str, str]]:
    """The engine as an offline caller has it: defaults but for the assignments."""
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


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2:]))
