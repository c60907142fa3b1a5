"""Trains the demo's model from nothing to its checkpoint: `python -m tests.demo_model --out DIR`.

The model is transformers' own Qwen3-MoE, so that its checkpoint is one by construction.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.demo_model.tasks import (
    END,
    PAD,
    Example,
    Task,
    all_tasks,
    make_tokenizer,
    prefix_text,
    question_text,
    save_tokenizer,
    special_id,
)

NUM_EXPERTS, TOP_K = 8, 2

BATCH_SIZE = 64

STEPS_TOGETHER = 8  # examples of so many steps are sorted by length, which leaves a tenth of the padding

PEAK_LEARNING_RATE = 2e-3
WARM_UP_STEPS, EXERCISE_STEPS, DECAY_STEPS = 100, 2400, 800
BALANCE_WEIGHT = 0.01
MAX_GRADIENT = 1.0
CHECK_STEPS, CHECK_EXAMPLES = 100, 192
GOAL = 0.99

FINAL_EXAMPLES = 1024
FINAL_SEED = 1 << 20  # of questions that no check in between has asked


@dataclass(frozen=True, eq=False)
class Batch:
    """Prompts with their answers, padded on the right; the system prompt, which all share, stands apart."""

    prefix_ids: torch.Tensor  # [1, S] int64
    ids: torch.Tensor  # [B, T] int64, each example from its user's turn to the end of its answer
    foretells: torch.Tensor  # [B, T - 1] bool: whether the token after this one is part of the answer

    @property
    def targets(self) -> torch.Tensor:
        """[N] int64: the tokens of all answers, one after the other."""
        return self.ids[:, 1:][self.foretells]


def make_batch(tokenizer: Tokenizer, task: Task, examples: Sequence[Example]) -> Batch:
    """The batch of these examples, in their order."""
    pad_id = special_id(tokenizer, PAD)
    questions = [encoding.ids for encoding in tokenizer.encode_batch_fast([question_text(e) for e in examples])]
    answers = [encoding.ids for encoding in tokenizer.encode_batch_fast([e.answer + END for e in examples])]
    width = max(len(question) + len(answer) for question, answer in zip(questions, answers, strict=True))
    ids = torch.full((len(examples), width), pad_id)
    foretells = torch.zeros(len(examples), width - 1, dtype=torch.bool)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor([*question, *answer])
        foretells[row, len(question) - 1 : end - 1] = True
    return Batch(torch.tensor([tokenizer.encode(prefix_text(task)).ids]), ids, foretells)


def make_model(tokenizer: Tokenizer, seed: int) -> Qwen3MoeForCausalLM:
    """The untrained model in float32."""
    end_id, pad_id = special_id(tokenizer, END), special_id(tokenizer, PAD)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end_id, pad_id], pad_token_id=pad_id)
    return model


def predict(model: Qwen3MoeForCausalLM, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits [N, V] for `batch.targets`, and each layer's router logits.

    The shared system prompt goes through the model once, not once an example.
    """
    size = batch.ids.shape[0]
    cache = model.model(batch.prefix_ids, use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys = layer.keys.expand(size, -1, -1, -1)
        layer.values = layer.values.expand(size, -1, -1, -1)
    # By place: transformers 5.24 calls the fourth argument `cache`, and warns of `past_key_values`, as 5.23 calls it.
    output = model.model(batch.ids[:, :-1], None, None, cache, use_cache=True, output_router_logits=True)
    return model.lm_head(output.last_hidden_state[batch.foretells]), output.router_logits


def balance_loss(router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """1 where every expert gets as many tokens as the others, more where some get none."""
    loss: torch.Tensor = load_balancing_loss_func(router_logits, NUM_EXPERTS, TOP_K)
    return loss


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


class TrainingBatches:
    """Batches by task and step, the same for the same seed wherever the training begins."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._groups: dict[str, tuple[int, list[Batch]]] = {}  # task -> number of the group, its batches

    def batch(self, task: Task, step: int) -> Batch:
        """The batch of one step."""
        number = step // STEPS_TOGETHER
        if self._groups.get(task.name, (-1,))[0] != number:
            self._groups[task.name] = (number, self._make_group(task, number))
        return self._groups[task.name][1][step % STEPS_TOGETHER]

    def _make_group(self, task: Task, number: int) -> list[Batch]:
        seed = self._seed * 1_000_003 + number + 1
        size = task.batch_size
        examples = sorted(
            islice(task.examples(seed, False), size * STEPS_TOGETHER), key=lambda example: len(example.user)
        )
        batches = [
            make_batch(self._tokenizer, task, examples[start : start + size]) for start in range(0, len(examples), size)
        ]
        random.Random(seed).shuffle(batches)
        return batches


@dataclass
class Training:
    """Trains a model until it answers 99 % of the held-out questions right, of each task but exercises, or the steps
    are nearly used up; then lets the learning rate run out.

    The first task is in every step, the others take turns: a call of a model this small costs as much as what it does.
    `state_path` holds all that a later run needs to go on where this one was stopped.
    """

    model: Qwen3MoeForCausalLM
    tokenizer: Tokenizer
    tasks: Sequence[Task]
    state_path: Path
    seed: int
    say: Callable[[str], None]
    step: int = 0
    decay_from: int | None = None  # the step from which the learning rate goes down

    def __post_init__(self) -> None:
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        scales = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": scales, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self._losses: dict[str, float] = {}  # in each task's last batch
        self._runner = TrainingBatches(self.tokenizer, self.seed)
        if self.state_path.exists():
            self._restore()

    def run(self, max_steps: int) -> None:
        """Train; at most `max_steps` steps from the very beginning."""
        started_s = time.monotonic()
        while self.step < max_steps and not self._has_decayed():
            if self.decay_from is None and self.step >= max_steps - DECAY_STEPS:
                self.decay_from = self.step
            self._train_step()
            if self.step % CHECK_STEPS == 0:
                self._check(time.monotonic() - started_s)
                self._save()

    def _has_decayed(self) -> bool:
        return self.decay_from is not None and self.step >= self.decay_from + DECAY_STEPS

    def learning_rate(self) -> float:
        """The current step's rate: a line up, a plateau, and once the goal is reached a line down."""
        if self.decay_from is not None:
            return PEAK_LEARNING_RATE * max(1 - (self.step - self.decay_from) / DECAY_STEPS, 0.01)
        return PEAK_LEARNING_RATE * min((self.step + 1) / WARM_UP_STEPS, 1.0)

    def _train_step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate()
        first, *others = [task for task in self.tasks if self.step < EXERCISE_STEPS or not task.is_exercise]
        for task in (first, others[self.step % len(others)]):
            batch = self._runner.batch(task, self.step)
            logits, router_logits = predict(self.model, batch)
            loss = torch.nn.functional.cross_entropy(logits, batch.targets)
            self._losses[task.name] = loss.item()
            torch.autograd.backward(loss + BALANCE_WEIGHT * balance_loss(router_logits))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1

    def _check(self, elapsed_s: float) -> None:
        right = {
            task.name: accuracy(self.model, self.tokenizer, task, seed=self.seed, count=CHECK_EXAMPLES)
            for task in self.tasks
        }
        told = ", ".join(f"{name} loss {self._losses.get(name, 0):.4f} right {right[name]:.1%}" for name in right)
        self.say(f"step {self.step}, {elapsed_s:.0f} s, {time.process_time():.0f} s of CPU: {told}")
        goals = [right[task.name] for task in self.tasks if not task.is_exercise]
        if self.decay_from is None and min(goals) >= GOAL:
            self.decay_from = self.step

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "decay_from": self.decay_from,
        }
        whole = self.state_path.with_suffix(".new")  # if stopped while this is written, the one before stays
        torch.save(state, whole)
        whole.replace(self.state_path)

    def _restore(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.decay_from = state["step"], state["decay_from"]
        self.say(f"goes on after step {self.step}")


def export(model: Qwen3MoeForCausalLM, path: Path) -> None:
    """Round the weights to bfloat16, in the model itself too, and write them with their config into `path`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)  # the library makes it readable to its owner alone
    for parameter in model.parameters():  # computing in float32 with these weights is what they are good for
        parameter.data = parameter.data.float()


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
