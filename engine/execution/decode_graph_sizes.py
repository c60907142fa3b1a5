"""For which numbers of rows decode steps are captured."""

from __future__ import annotations

# Steps of a hundred rows and more keep a GPU busy for milliseconds; the launches saved no longer count beyond this.
MAX_DEFAULT_SIZE = 512


def decode_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 to 64, every 16 to 256 and every 32 to 512; the last is max_num_seqs or 512.

    A step pads to the next size: less than half of its rows up to 16, less than a fifth above 64.
    """
    limit = min(max_num_seqs, MAX_DEFAULT_SIZE)
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_DEFAULT_SIZE, 32))
    return (*(size for size in sizes if size < limit), limit)
