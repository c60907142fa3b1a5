"""The sizes that are captured unless others are set."""

from __future__ import annotations

import pytest

from engine.execution.decode_graphs import decode_graph_sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_steps_widen_and_the_last_size_holds_every_sequence(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert decode_graph_sizes(max_num_seqs) == expected


def test_beyond_512_rows_nothing_is_captured() -> None:
    sizes = decode_graph_sizes(65_536)
    assert sizes[-10:] == (240, 256, 288, 320, 352, 384, 416, 448, 480, 512)
    assert sizes == decode_graph_sizes(512)
    assert len(sizes) == 31
    rows = range(9, 513)
    assert max((min(size for size in sizes if size >= m) - m) / m for m in rows) < 0.8
