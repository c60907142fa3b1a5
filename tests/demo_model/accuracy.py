"""How many held-out questions a model in training answers right."""

from __future__ import annotations

from itertools import islice

import torch
from tokenizers import Tokenizer
from transformers import Qwen3MoeForCausalLM

from tests.demo_model.batch import make_batch
from tests.demo_model.model import predict
from tests.demo_model.task import Task

BATCH_SIZE = 64


@torch.no_grad()
def accuracy(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, task: Task, *, seed: int, count: int) -> float:
    """The share of answers of which every token is the model's first choice, that is, its greedy answer."""
    examples = list(islice(task.examples(seed, True), count))
    num_right = 0
    for start in range(0, count, BATCH_SIZE):
        batch = make_batch(tokenizer, task, examples[start : start + BATCH_SIZE])
        logits, _ = predict(model, batch)
        wrong_rows = batch.foretells.nonzero()[:, 0][logits.argmax(-1) != batch.targets]
        num_right += batch.ids.shape[0] - len(set(wrong_rows.tolist()))
    return num_right / count
