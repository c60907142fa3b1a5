"""The model interface: each verb, mixed prefill and decode, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import InvalidRequest, KVPoolExhausted, NonFiniteLogits, PromptTooLong
from engine.execution.forward import StepExecutor
from engine.model_interface import (
    DecodeItem,
    ErrorResult,
    LogitsResult,
    ModelInterface,
    TokenResult,
    UnifiedItem,
    UnifiedRefusal,
    UnifiedRefused,
)
from tests.support.engines import PROMPT, error_of, greedy_request, load_engine, logits_of, make_model_interface


def _free(interface: ModelInterface) -> int:
    return interface.status().free_blocks


def test_the_warm_up_gives_its_block_back_and_leaves_nothing_to_hit(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint, kv_cache__num_blocks="3")
    assert _free(interface) == 2
    interface.prepare("a", 32)
    assert (_free(interface), interface.cache_metrics_snapshot().registered_blocks) == (2, 0)


def test_prepare_works_in_a_pool_for_one_and_ids_start_at_zero(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint, kv_cache__num_blocks="2")
    interface.prepare("a", 16)
    assert logits_of(interface.prefill("a", PROMPT[:8])).shape == (320,)
    assert interface.status().free_blocks == 0


def test_prepare_says_what_it_lacks(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint, kv_cache__num_blocks="5")
    interface.prefill("a", PROMPT)
    with pytest.raises(KVPoolExhausted) as caught:
        interface.prepare("b", 40)
    assert (caught.value.need, caught.value.free) == (3, 1)
    with pytest.raises(PromptTooLong) as too_long:
        interface.prepare("c", 65)
    assert (too_long.value.need, too_long.value.capacity) == (65, 64)


@pytest.mark.parametrize("name", ["__millrace_warm_up__", "__millrace_mine"])
def test_reserved_ids_are_refused(moe_checkpoint: Path, name: str) -> None:
    interface = make_model_interface(moe_checkpoint)
    with pytest.raises(InvalidRequest, match="__millrace"):
        interface.prepare(name, 4)


def test_a_model_that_answers_nan_fails_its_warm_up_and_says_so(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    engine.model.final_norm.fill_(torch.nan)
    with pytest.raises(NonFiniteLogits):
        engine.model_interface.warm_up()
    assert (engine.model_interface.status().state, _free(engine.model_interface)) == ("failed", 399)


def test_the_capacity_is_one_figure_and_not_a_silent_512(moe_checkpoint: Path) -> None:
    assert make_model_interface(moe_checkpoint).kv_capacity() == 1024
    assert make_model_interface(moe_checkpoint, max_model_len="100").kv_capacity() == 100
    assert make_model_interface(moe_checkpoint, kv_cache__num_blocks="5").kv_capacity() == 64


def test_a_prefix_hit_gives_the_samelogits_of(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    first = logits_of(interface.prefill("a", PROMPT)).clone()
    second = logits_of(interface.prefill("b", PROMPT))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)
    assert interface.cache_metrics_snapshot().saved_prefill_tokens == 32


def test_the_prefix_cache_survives_the_release_of_the_last_sequence(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    interface.prefill("a", PROMPT)
    interface.release("a")
    assert interface.status().num_sequences == 0
    interface.prefill("a", PROMPT)
    assert interface.cache_metrics_snapshot().saved_prefill_tokens == 32


def test_release_is_idempotent_and_frees_once(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    interface.prefill("a", PROMPT)
    for _ in range(3):
        interface.release("a")
    interface.release("never seen")
    assert _free(interface) == 399


def test_two_independent_sequences_after_idle_are_answered_as_if_alone(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint, prefix_cache__enabled="false")
    expected = [logits_of(interface.prefill(n, [i] * 20)).clone() for i, n in enumerate("ab")]
    for name in "ab":
        interface.release(name)
    again = [logits_of(interface.prefill(n, [i] * 20)) for i, n in enumerate("ab")]
    for one, other in zip(expected, again, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "no tokens"), ([320], "token id 320"), ([-1], "token id -1"), ([0] * 65, "needs 65 tokens")],
)
def test_a_bad_prompt_is_an_error_result_and_holds_nothing(
    moe_checkpoint: Path, tokens: list[int], message: str
) -> None:
    interface = make_model_interface(moe_checkpoint, kv_cache__num_blocks="5")
    assert message in str(error_of(interface.prefill("a", tokens)))
    assert (_free(interface), interface.status().num_sequences) == (4, 0)


def test_an_exhausted_pool_is_an_error_result_with_need_and_free(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint, kv_cache__num_blocks="4")
    interface.prefill("a", PROMPT)
    error = error_of(interface.prefill("b", PROMPT[::-1]))
    assert isinstance(error, KVPoolExhausted)
    assert (error.need, error.free) == (3, 0)
    interface.release("a")
    assert isinstance(interface.prefill("b", PROMPT[::-1]), LogitsResult)


def test_a_prompt_longer_than_a_step_is_run_in_chunks(moe_checkpoint: Path) -> None:
    whole = logits_of(make_model_interface(moe_checkpoint).prefill("a", PROMPT))
    interface = make_model_interface(moe_checkpoint, max_num_batched_tokens="7", max_num_seqs="7")
    steps = interface.status().num_forward_passes
    torch.testing.assert_close(logits_of(interface.prefill("a", PROMPT)), whole, atol=1e-5, rtol=0)
    assert interface.status().num_forward_passes - steps == 6


def test_a_second_prefill_continues_the_sequence(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    whole = logits_of(interface.prefill("whole", PROMPT)).clone()
    interface.prefill("parts", PROMPT[:23])
    torch.testing.assert_close(logits_of(interface.prefill("parts", PROMPT[23:])), whole, atol=1e-5, rtol=0)


def _prefilled(interface: ModelInterface, count: int) -> list[DecodeItem]:
    for index in range(count):
        interface.prefill(f"s{index}", [index, *PROMPT[: 3 + index]])
    return [DecodeItem(f"s{index}", 7, 4 + index) for index in range(count)]


@pytest.mark.parametrize(("batched", "threshold"), [("true", "2"), ("true", "4"), ("true", "100"), ("false", "2")])
def test_the_shape_of_decode_results_does_not_depend_on_the_path(
    moe_checkpoint: Path, batched: str, threshold: str
) -> None:
    interface = make_model_interface(moe_checkpoint, decode__batched=batched, decode__batch_threshold=threshold)
    items = _prefilled(interface, 5)
    before = interface.status().num_forward_passes
    results = interface.decode_batch(items)
    passes = interface.status().num_forward_passes - before
    assert passes == (1 if batched == "true" and int(threshold) <= 5 else 5)
    reference = make_model_interface(moe_checkpoint)
    _prefilled(reference, 5)
    expected = [int(logits_of(reference.decode(i.cache_id, i.token_id, i.position)).argmax()) for i in items]
    assert [r.token_id for r in results if isinstance(r, TokenResult)] == expected


def test_full_logits_are_given_when_asked_for_or_when_the_switch_is_off(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    assert all(isinstance(r, LogitsResult) for r in interface.decode_batch(_prefilled(interface, 3), full_logits=True))
    interface = make_model_interface(moe_checkpoint, greedy_argmax="false")
    assert all(isinstance(r, LogitsResult) for r in interface.decode_batch(_prefilled(interface, 3)))


def test_a_decode_batch_wider_than_the_engine_runs_in_parts(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint, max_num_seqs="4")
    results = interface.decode_batch(_prefilled(interface, 6))
    assert len(results) == 6
    assert all(isinstance(result, TokenResult) for result in results)


def test_an_empty_decode_batch_has_no_results(moe_checkpoint: Path) -> None:
    assert make_model_interface(moe_checkpoint).decode_batch([]) == []


def test_one_bad_item_never_fails_its_batch_mates(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    items = _prefilled(interface, 3)
    bad = [
        DecodeItem("unknown", 1, 0),
        items[0],
        DecodeItem("s1", 7, 99),
        DecodeItem("s2", 4000, 6),
        items[0],
    ]
    results = interface.decode_batch(bad)
    assert [type(result) for result in results] == [ErrorResult, TokenResult, ErrorResult, ErrorResult, ErrorResult]
    assert "position is 99; the sequence holds 5 tokens" in str(error_of(results[2]))
    assert "twice in one batch" in str(error_of(results[4]))
    assert isinstance(interface.decode_batch([items[1]])[0], TokenResult)


def test_an_item_with_nan_fails_alone_and_its_blocks_are_never_hit(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    interface = engine.model_interface
    interface.prefill("first", PROMPT)
    engine.spoil("__millrace/first")
    assert isinstance(interface.prefill("other", PROMPT[::-1]), LogitsResult)
    assert isinstance(error_of(interface.prefill("second", PROMPT)), NonFiniteLogits)
    results = interface.decode_batch([DecodeItem("first", 7, 40), DecodeItem("other", 7, 40)])
    assert isinstance(error_of(results[0]), NonFiniteLogits)
    assert isinstance(results[1], TokenResult)
    assert interface.status().num_sequences == 1
    saved = interface.cache_metrics_snapshot().saved_prefill_tokens
    assert isinstance(interface.prefill("first", PROMPT), LogitsResult)
    assert interface.cache_metrics_snapshot().saved_prefill_tokens == saved


def test_the_interface_and_the_engine_may_use_the_same_names(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    engine.model_interface.prefill("a/0", PROMPT)
    engine.add_request(greedy_request("a", PROMPT, 3))
    engine.step()
    assert engine.model_interface.status().num_sequences == 2


def test_reset_names_everyone_it_drops_and_keeps_the_pool(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    interface.prefill("a", PROMPT)
    interface.prepare("b", 4)
    assert interface.reset() == ["a", "b"]
    assert interface.reset() == []
    assert _free(interface) == 399


def test_a_failing_forward_pass_leaves_no_half_run_sequence(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = load_engine(moe_checkpoint)

    def out_of_memory(*_: object) -> torch.Tensor:
        raise MemoryError("no memory for activations")

    monkeypatch.setattr(StepExecutor, "execute", out_of_memory)
    with pytest.raises(MemoryError):
        engine.model_interface.prefill("a", PROMPT)
    with pytest.raises(MemoryError):
        engine.model_interface.unified_forward([UnifiedItem("a", PROMPT, 0, True), UnifiedItem("b", PROMPT, 0, True)])
    monkeypatch.undo()
    assert (_free(engine.model_interface), engine.model_interface.status().num_sequences) == (399, 0)
    assert isinstance(engine.model_interface.prefill("a", PROMPT), LogitsResult)


def test_capabilities_are_computed_from_the_model(moe_checkpoint: Path) -> None:
    found = make_model_interface(moe_checkpoint).capabilities()
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (found.attention, found.dtype, found.device) == ("gqa", "float32", "cpu")
    assert (found.max_batch_size, found.max_sequence_tokens, found.cuda_graphs) == (64, 1024, False)


def test_unified_forward_runs_chunks_and_decodes_in_one_pass(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    interface.prefill("old", PROMPT[:10])
    before = interface.status().num_forward_passes
    results = interface.unified_forward(
        [UnifiedItem("new", PROMPT, 0, False), UnifiedItem("old", [5], 10, True)], full_logits=True
    )
    assert interface.status().num_forward_passes - before == 1
    assert results[0] is None
    alone = make_model_interface(moe_checkpoint)
    expected = logits_of(alone.prefill("old", [*PROMPT[:10], 5]))
    torch.testing.assert_close(logits_of(results[1]), expected, atol=1e-5, rtol=0)


def test_a_chunk_with_nan_fails_at_once_and_its_blocks_are_never_hit(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    interface = engine.model_interface
    interface.prefill("old", PROMPT[:10])
    engine.model.embed_tokens.tensor[250] = torch.nan
    results = interface.unified_forward(
        [UnifiedItem("bad", [*PROMPT, 250], 0, False), UnifiedItem("old", [5], 10, True)]
    )
    assert isinstance(error_of(results[0]), NonFiniteLogits)
    assert isinstance(results[1], TokenResult)
    assert interface.status().num_sequences == 1
    assert isinstance(interface.prefill("good", PROMPT), LogitsResult)
    assert interface.cache_metrics_snapshot().saved_prefill_tokens == 0


def test_unified_forward_probes_and_registers_prefixes_as_every_path_does(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    interface.prefill("a", PROMPT)
    interface.unified_forward([UnifiedItem("b", PROMPT, 0, True), UnifiedItem("c", [9, 9, 9], 0, True)])
    assert interface.cache_metrics_snapshot().saved_prefill_tokens == 32


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
    interface = make_model_interface(moe_checkpoint, max_num_batched_tokens="64", max_num_seqs="3")
    known = {name: len(PROMPT) for name in "ab"}
    for name in known:
        interface.prefill(name, PROMPT)
    before = interface.status()
    with pytest.raises(UnifiedRefused) as caught:
        interface.unified_forward(
            [UnifiedItem(name, PROMPT[:1] * count, known.get(name, 0), final) for name, count, final in items]
        )
    assert caught.value.reason is reason
    assert interface.status() == before


def test_unified_forward_is_refused_when_switched_off(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint, unified_prefill="false")
    with pytest.raises(UnifiedRefused) as caught:
        interface.unified_forward([UnifiedItem("a", PROMPT, 0, True), UnifiedItem("b", PROMPT, 0, True)])
    assert caught.value.reason is UnifiedRefusal.SWITCHED_OFF


def test_unified_forward_answers_each_item_and_rejects_an_empty_one(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    assert interface.unified_forward([]) == []
    results = interface.unified_forward([UnifiedItem("a", PROMPT, 0, True), UnifiedItem("b", [], 0, True)])
    assert isinstance(results[0], TokenResult)
    assert "no tokens" in str(error_of(results[1]))


def test_new_sequences_of_one_token_are_no_decode(moe_checkpoint: Path) -> None:
    interface = make_model_interface(moe_checkpoint)
    results = interface.unified_forward([UnifiedItem("a", [1], 0, True), UnifiedItem("b", [2], 0, True)])
    assert all(isinstance(result, TokenResult) for result in results)
