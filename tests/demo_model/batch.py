"""Examples of one task as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from tests.demo_model.example import Example
from tests.demo_model.task import Task
from tests.demo_model.tokenizer import END, PAD, prefix_text, question_text, special_id


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
