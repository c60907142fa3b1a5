"""From hidden states of prompts to the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import EngineFatal
from engine.models.decoder_model import DecoderModel
from engine.prompt_logprobs import PromptLogprobs

# Of float32 logits at a time; with their log-softmax and the model dtype's copy 2.5 times as much. A chunk of 2,048
# tokens over a vocabulary of 152,000 would take 1.2 GB, and as much again.
MAX_LOGITS_BYTES = 64 << 20


class PromptScorer:
    """Scores what a step computed of prompts, all prompts together, a bounded number of positions at a time."""

    def __init__(self, model: DecoderModel, *, max_logits_bytes: int = MAX_LOGITS_BYTES) -> None:
        self._model = model
        self._max_rows = max(1, max_logits_bytes // (4 * model.config.vocab_size))

    @torch.inference_mode()
    def score(self, prompts: Sequence[tuple[PromptLogprobs, int, torch.Tensor]]) -> list[bool]:
        """Fill in what these make known: (entries, start, hidden), hidden [n, H] those of positions start .. start + n.

        Positions that have their entry, as after a preemption, and the last one, which predicts nothing of the prompt,
        are left out; none before `start` may lack its entry. Returns for each whether its logits were finite: where
        they are not, entries stop before them.
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
        are_good = [True] * len(prompts)
        if not targets:
            return are_good
        rows = torch.cat(pieces)
        for first in range(0, len(targets), self._max_rows):
            end = min(first + self._max_rows, len(targets))
            logprobs, chosen, finite = self._logprobs(rows[first:end], targets[first:end])
            for index, own_first, own_end in owners:
                those = slice(max(own_first, first) - first, min(own_end, end) - first)
                if those.start < those.stop and are_good[index]:
                    are_good[index] = all(finite[those])
                    if are_good[index]:
                        _add(prompts[index][0], chosen[those], logprobs[those])
            del logprobs  # else it would still be there while the next ones are made
        return are_good

    def _logprobs(
        self, rows: torch.Tensor, targets: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[float], Sequence[bool]]:
        """Of rows [R, H]: raw log-softmax [R, V], that of each row's next token, and which rows are finite."""
        logits = self._model.logits(rows)
        finite = torch.isfinite(logits.amax(dim=-1))  # NaN propagates through amax
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, torch.tensor(targets, dtype=torch.int64, device=rows.device).unsqueeze(1))
        return logprobs, chosen[:, 0].tolist(), finite.tolist()


def _add(entries: PromptLogprobs, chosen: Sequence[float], logprobs: torch.Tensor) -> None:
    """logprobs: [r, V]."""
    values, token_ids = logprobs.topk(min(entries.num_top, logprobs.shape[-1]), dim=-1)
    entries.add(chosen, token_ids.flatten().tolist(), values.flatten().tolist())
