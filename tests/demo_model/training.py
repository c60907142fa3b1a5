"""The training itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3MoeForCausalLM

from tests.demo_model.accuracy import accuracy
from tests.demo_model.model import balance_loss, predict
from tests.demo_model.task import Task
from tests.demo_model.training_batches import TrainingBatches

PEAK_LEARNING_RATE = 2e-3
WARM_UP_STEPS, EXERCISE_STEPS, DECAY_STEPS = 100, 2400, 800
BALANCE_WEIGHT = 0.01
MAX_GRADIENT = 1.0
CHECK_STEPS, CHECK_EXAMPLES = 100, 192
GOAL = 0.99


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
        self._losses: dict[str, float] = {}  # of each task's last batch
        self._batches = TrainingBatches(self.tokenizer, self.seed)
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
        """Of the current step: a line up, a plateau, and once the goal is reached a line down."""
        if self.decay_from is not None:
            return PEAK_LEARNING_RATE * max(1 - (self.step - self.decay_from) / DECAY_STEPS, 0.01)
        return PEAK_LEARNING_RATE * min((self.step + 1) / WARM_UP_STEPS, 1.0)

    def _train_step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate()
        first, *others = [task for task in self.tasks if self.step < EXERCISE_STEPS or not task.is_exercise]
        for task in (first, others[self.step % len(others)]):
            batch = self._batches.batch(task, self.step)
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
        whole = self.state_path.with_suffix(".new")  # a stop while it is written leaves the one before
        torch.save(state, whole)
        whole.replace(self.state_path)

    def _restore(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.decay_from = state["step"], state["decay_from"]
        self.say(f"goes on after step {self.step}")
