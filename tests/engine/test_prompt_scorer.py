"""What the scorer makes of hidden states that an engine does not usually bring."""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineFatal
from engine.models.decoder import DecoderModel
from engine.prompt_logprobs import PromptScorer
from engine.request import PromptLogprobs
from tests.support.engines import load_engine
from tests.support.tiny_checkpoint import VOCAB_SIZE, make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_engine(make_checkpoint(tmp_path_factory.mktemp("scorer") / "tiny", "qwen3"))._executor.model


def test_one_position_that_is_not_finite_is_enough(model: DecoderModel) -> None:
    hidden = torch.randn(9, model.config.hidden_size)
    hidden[3, 0] = torch.nan
    spoilt, good = (PromptLogprobs(list(range(10)), 1) for _ in range(2))
    scorer = PromptScorer(model, max_logits_bytes=8 * VOCAB_SIZE)
    assert scorer.score([(spoilt, 0, hidden), (good, 0, hidden[4:])]).now() == [False, True]
    assert good.num_scored == 5
    assert not spoilt.is_complete


def test_a_position_that_was_left_out_is_noticed(model: DecoderModel) -> None:
    hidden = torch.randn(2, model.config.hidden_size)
    with pytest.raises(EngineFatal, match="positions 0 to 3"):
        PromptScorer(model).score([(PromptLogprobs(list(range(10)), 1), 4, hidden)])


def test_positions_that_have_their_entries_and_those_behind_the_prompt_are_left_out(model: DecoderModel) -> None:
    hidden = torch.randn(12, model.config.hidden_size)
    whole, pieces = (PromptLogprobs(list(range(10)), 2) for _ in range(2))
    scorer = PromptScorer(model)
    assert scorer.score([(whole, 0, hidden)]).now() == [True]
    for start, end in ((0, 4), (0, 3), (2, 6), (0, 12), (9, 12)):
        assert scorer.score([(pieces, start, hidden[start:end])]).now() == [True]
    for one, other in zip(whole, pieces, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


def test_no_more_alternatives_than_the_vocabulary_has(model: DecoderModel) -> None:
    entries = PromptLogprobs([1, 2, 3], 1000)
    assert PromptScorer(model).score([(entries, 0, torch.randn(3, model.config.hidden_size))]).now() == [True]
    first, *others = entries
    assert first is None
    for entry in others:
        assert entry is not None
        assert len(dict(entry.top)) == VOCAB_SIZE
        assert dict(entry.top)[entry.token_id] == entry.logprob
    assert entries[-1] == others[-1]
    assert entries[1:] == others
