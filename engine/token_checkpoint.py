"""How far a request had come."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence_checkpoint import SequenceCheckpoint


@dataclass(frozen=True, slots=True)
class TokenCheckpoint:
    """What an unfinished request had generated: enough to go on with it, in any engine with the same model.

    Text, penalties and stop strings are not in it: they follow from the tokens, which are replayed.
    """

    identity: str  # digest of model, prompt and parameters: it is worth nothing for any other request
    base_seed: int  # of the draws; also of a request that brought none, so that it goes on with the same draws
    sequences: tuple[SequenceCheckpoint, ...]  # in index order, as many as the request's n

    @property
    def num_tokens(self) -> int:
        """Tokens generated, of all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)
