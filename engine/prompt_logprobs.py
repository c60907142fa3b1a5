"""Computes the log-probabilities of prompts' own tokens from their hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.errors import EngineFatal
from engine.models.decoder import DecoderModel
from engine.request import PromptLogprobs
from engine.staging import ArrayStaging, PendingResult

# Float32 logits at a time; with their log-softmax and the copy in the model's dtype 2.5 times as much. All logits of a
# chunk of 2,048 tokens with a vocabulary of 152,000 would take 1.2 GB, and as much again.
MAX_LOGITS_BYTES = 64 << 20


class PromptScorer:
    """Scores the prompt positions of a step, those of all prompts together, a bounded number at a time."""

    def __init__(self, model: DecoderModel, *, max_logits_bytes: int = MAX_LOGITS_BYTES) -> None:
        self._model = model
        self._staging = ArrayStaging(model.device)
        self._max_rows = max(1, max_logits_bytes // (4 * model.config.vocab_size))

    @torch.inference_mode()
    def score(self, prompts: Sequence[tuple[PromptLogprobs, int, torch.Tensor]]) -> PendingResult[list[bool]]:
        """Score (entries, start, hidden), with hidden [n, H] of positions start .. start + n - 1.

        Left out are positions that have their entry, as after a preemption, and the last one, which predicts nothing of
        the prompt; all before `start` must have theirs. Reading the result fills in the entries, and tells for each
        prompt whether its logits were finite: entries stop before the first that are not.
        """
        pieces: list[torch.Tensor] = []
        targets: list[int] = []
        owners: list[tuple[int, int, int]] = []  # index of the prompt, its first row, the one behind its last
        for index, (entries, start, hidden) in enumerate(prompts):
            first, end = entries.num_scored, min(start + hidden.shape[0], len(entries) - 1)
            if first < start:
                raise EngineFatal(f"positions {first} to {start - 1} of a prompt were never computed")
            if first < end:
                pieces.append(hidden[first - start : end - start])
                owners.append((index, len(targets), len(targets) + end - first))
                targets += entries.token_ids[first + 1 : end + 1]
        scored = [entries for entries, _, _ in prompts]
        tensors, shares = self._launch(torch.cat(pieces), targets, owners, scored) if targets else ([], [])
        return PendingResult(tuple(tensors), lambda on_host: _read(on_host, shares, scored))

    def _launch(
        self,
        rows: torch.Tensor,
        targets: Sequence[int],
        owners: Sequence[tuple[int, int, int]],
        prompts: Sequence[PromptLogprobs],
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Four tensors for each prompt in a slice of the rows: log-probabilities of the next tokens [r], which rows are
        finite [r], best log-probabilities and their ids [r, n]; and the index of the prompt that each four belong to.
        """
        (next_ids,) = self._staging.send([np.array(targets, dtype=np.int64)])
        tensors: list[torch.Tensor] = []
        shares: list[int] = []
        for first in range(0, len(targets), self._max_rows):
            end = min(first + self._max_rows, len(targets))
            logprobs, chosen, finite = self._logprobs(rows[first:end], next_ids[first:end])
            for index, own_first, own_end in owners:
                those = slice(max(own_first, first) - first, min(own_end, end) - first)
                if those.start < those.stop:
                    best, best_ids = logprobs[those].topk(min(prompts[index].num_top, logprobs.shape[-1]), dim=-1)
                    tensors += [chosen[those], finite[those], best, best_ids.int()]
                    shares.append(index)
            del logprobs  # else they would take memory beside the next ones
        return tensors, shares

    def _logprobs(self, rows: torch.Tensor, next_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For rows [R, H]: raw log-softmax [R, V], that of each row's next token [R], and which rows are finite [R]."""
        logits = self._model.logits(rows)
        finite = torch.isfinite(logits.amax(dim=-1))  # NaN propagates through amax
        logprobs = torch.log_softmax(logits, dim=-1)
        return logprobs, logprobs.gather(1, next_ids.unsqueeze(1)).squeeze(1), finite


def _read(on_host: Sequence[torch.Tensor], shares: Sequence[int], prompts: Sequence[PromptLogprobs]) -> list[bool]:
    are_good = [True] * len(prompts)
    for number, index in enumerate(shares):
        chosen, finite, best, best_ids = on_host[4 * number : 4 * number + 4]
        are_good[index] = are_good[index] and all(finite.tolist())
        if are_good[index]:
            prompts[index].add(chosen.tolist(), best_ids.flatten().tolist(), best.flatten().tolist())
    return are_good
