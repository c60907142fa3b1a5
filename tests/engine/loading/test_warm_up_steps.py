"""Which steps the warm-up runs, from the settings alone."""

from __future__ import annotations

from engine.loading.warm_up import compiling_steps, first_of_each, largest_steps
from settings import EngineSettings


def _settings(**values: object) -> EngineSettings:
    return EngineSettings.model_validate({"max_num_seqs": 4, "max_num_batched_tokens": 100, **values})


def test_the_largest_steps_are_full_of_tokens_of_sequences_and_of_keys() -> None:
    mixed, chunks, decode = (step.rows for step in largest_steps(_settings(), 1000))
    assert mixed == ((1, 1000),) * 3 + ((97, 1000),)
    assert chunks == ((100, 1000),)
    assert decode == ((1, 1000),) * 4


def test_a_short_context_takes_several_chunks_but_no_more_than_can_run() -> None:
    _, chunks, _ = largest_steps(_settings(), 30)
    assert chunks.rows == ((30, 30), (30, 30), (30, 30), (10, 30))
    _, chunks, _ = largest_steps(_settings(max_num_batched_tokens=1000), 30)
    assert chunks.rows == ((30, 30),) * 4


def test_each_class_of_tokens_is_run_once_where_it_begins() -> None:
    assert first_of_each(lambda tokens: tokens > 64, 100) == [1, 65]
    assert first_of_each(lambda tokens: tokens % 3 == 0, 2) == [1]
    rows = [step.rows for step in compiling_steps(_settings(), 1000, lambda tokens: tokens > 64)]
    assert rows == [((1, 2),), ((1, 1000),), ((1, 1000),), ((65, 1000),)]


def test_groups_of_rows_double_where_prefixes_are_shared() -> None:
    steps = compiling_steps(_settings(shared_prefix={"enabled": True}), 1000, lambda _: 0)
    shared = [step.rows for step in steps if step.shares_prefix]
    assert [len(rows) for rows in shared] == [2, 2, 2, 4, 4, 4]
    assert {rows[0][0] for rows in shared} == {1, 2, 25, 50}


def test_rows_read_and_write_one_block_whatever_their_length() -> None:
    (mixed, _, _) = largest_steps(_settings(), 1000)
    items = mixed.items(16, generates=True)
    assert [len(item.token_ids) for item in items] == [1, 1, 1, 97]
    assert {tuple(item.block_table) for item in items} == {(1,) * 63}
    assert [item.wants_hidden for item in items] == [False, False, False, True]
    assert all(item.wants_logits for item in items)
    assert not any(item.wants_logits for item in mixed.items(16, generates=False))
