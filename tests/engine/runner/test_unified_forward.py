"""Mixed prefill and decode through the model interface, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import NonFiniteLogits
from engine.model_interface import LogitsResult, TokenResult, UnifiedItem, UnifiedRefusal, UnifiedRefused
from tests.support.engines import load_engine
from tests.support.runners import PROMPT, error_of, logits_of, make_runner


def test_unified_forward_runs_chunks_and_decodes_in_one_pass(moe_checkpoint: Path) -> None:
    runner = make_runner(moe_checkpoint)
    runner.prefill("old", PROMPT[:10])
    before = runner.status().num_forward_passes
    results = runner.unified_forward(
        [UnifiedItem("new", PROMPT, 0, False), UnifiedItem("old", [5], 10, True)], full_logits=True
    )
    assert runner.status().num_forward_passes - before == 1
    assert results[0] is None
    alone = make_runner(moe_checkpoint)
    expected = logits_of(alone.prefill("old", [*PROMPT[:10], 5]))
    torch.testing.assert_close(logits_of(results[1]), expected, atol=1e-5, rtol=0)


def test_a_chunk_with_nan_fails_at_once_and_its_blocks_are_never_hit(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    runner = engine.runner
    runner.prefill("old", PROMPT[:10])
    engine._executor.model.embed_tokens[250] = torch.nan
    results = runner.unified_forward([UnifiedItem("bad", [*PROMPT, 250], 0, False), UnifiedItem("old", [5], 10, True)])
    assert isinstance(error_of(results[0]), NonFiniteLogits)
    assert isinstance(results[1], TokenResult)
    assert runner.status().num_sequences == 1
    assert isinstance(runner.prefill("good", PROMPT), LogitsResult)
    assert runner.cache_metrics_snapshot().saved_prefill_tokens == 0


def test_unified_forward_probes_and_registers_prefixes_as_every_path_does(moe_checkpoint: Path) -> None:
    runner = make_runner(moe_checkpoint)
    runner.prefill("a", PROMPT)
    runner.unified_forward([UnifiedItem("b", PROMPT, 0, True), UnifiedItem("c", [9, 9, 9], 0, True)])
    assert runner.cache_metrics_snapshot().saved_prefill_tokens == 32


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([("a", 1, True), ("b", 1, True)], UnifiedRefusal.PURE_DECODE),
        ([("c", 5, True)], UnifiedRefusal.SINGLE_PREFILL),
        ([("c", 60, True), ("d", 5, False)], UnifiedRefusal.TOO_MANY_TOKENS),
        ([("c", 2, True), ("d", 2, True), ("e", 2, True), ("f", 2, True)], UnifiedRefusal.TOO_MANY_SEQUENCES),
    ],
)
def test_unified_forward_refuses_by_an_enum_and_runs_nothing(
    moe_checkpoint: Path, items: list[tuple[str, int, bool]], reason: UnifiedRefusal
) -> None:
    runner = make_runner(moe_checkpoint, max_num_batched_tokens="64", max_num_seqs="3")
    known = {name: len(PROMPT) for name in "ab"}
    for name in known:
        runner.prefill(name, PROMPT)
    before = runner.status()
    with pytest.raises(UnifiedRefused) as caught:
        runner.unified_forward(
            [UnifiedItem(name, PROMPT[:1] * count, known.get(name, 0), final) for name, count, final in items]
        )
    assert caught.value.reason is reason
    assert runner.status() == before


def test_unified_forward_is_refused_when_switched_off(moe_checkpoint: Path) -> None:
    runner = make_runner(moe_checkpoint, unified_prefill="false")
    with pytest.raises(UnifiedRefused) as caught:
        runner.unified_forward([UnifiedItem("a", PROMPT, 0, True), UnifiedItem("b", PROMPT, 0, True)])
    assert caught.value.reason is UnifiedRefusal.SWITCHED_OFF


def test_unified_forward_answers_each_item_and_rejects_an_empty_one(moe_checkpoint: Path) -> None:
    runner = make_runner(moe_checkpoint)
    assert runner.unified_forward([]) == []
    results = runner.unified_forward([UnifiedItem("a", PROMPT, 0, True), UnifiedItem("b", [], 0, True)])
    assert isinstance(results[0], TokenResult)
    assert "no tokens" in str(error_of(results[1]))


def test_new_sequences_of_one_token_are_no_decode(moe_checkpoint: Path) -> None:
    runner = make_runner(moe_checkpoint)
    results = runner.unified_forward([UnifiedItem("a", [1], 0, True), UnifiedItem("b", [2], 0, True)])
    assert all(isinstance(result, TokenResult) for result in results)
