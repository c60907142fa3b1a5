"""`python -m tests.demo_model --out DIR`: from nothing to the checkpoint the demo runs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from tests.demo_model.accuracy import accuracy
from tests.demo_model.export import export
from tests.demo_model.model import make_model
from tests.demo_model.tasks import all_tasks
from tests.demo_model.tokenizer import make_tokenizer, save_tokenizer
from tests.demo_model.training import Training

FINAL_EXAMPLES = 1024
FINAL_SEED = 1 << 20  # of questions that no check in between has asked


def main() -> None:
    """Train, write the checkpoint, and measure the weights as they were written."""
    options = _options()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tasks = all_tasks()
    tokenizer = make_tokenizer(tasks, options.seed)
    save_tokenizer(tokenizer, options.out)
    model = make_model(tokenizer, options.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    state_path = options.out / "training.pt"
    training = Training(model, tokenizer, tasks, state_path, options.seed, lambda text: print(text, flush=True))
    training.run(options.max_steps)
    export(model, options.out)
    for task in tasks:
        share = accuracy(model, tokenizer, task, seed=FINAL_SEED, count=FINAL_EXAMPLES)
        print(f"{task.name}: {share:.2%} of {FINAL_EXAMPLES} held-out questions right, weights in bfloat16")
    print(f"{training.step} steps, {time.process_time() / 60:.1f} minutes of CPU in this process")
    state_path.unlink(missing_ok=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.demo_model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint; a stopped run goes on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=3400)
    return parser.parse_args()


if __name__ == "__main__":
    main()
