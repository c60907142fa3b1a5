from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SequenceCheckpoint, TokenCheckpoint, TokenLogprobs
from worker.runtime.shard import decode_checkpoint, encode_checkpoint

token_ids = st.integers(min_value=0, max_value=2**31)
logprobs = st.floats(max_value=0.0, allow_nan=False)
token_logprobs = st.builds(
    TokenLogprobs, token_ids, logprobs, st.lists(st.tuples(token_ids, logprobs), max_size=3).map(tuple)
)
sequences = st.builds(
    SequenceCheckpoint,
    st.lists(token_ids, max_size=20).map(tuple),
    st.none() | st.lists(token_logprobs, max_size=5).map(tuple),
)
checkpoints = st.builds(
    TokenCheckpoint,
    st.text("0123456789abcdef"),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.lists(sequences, max_size=3).map(tuple),
)


@given(checkpoints)
def test_what_is_read_is_what_was_written_to_the_bit(checkpoint: TokenCheckpoint) -> None:
    assert decode_checkpoint(encode_checkpoint(checkpoint).encode("ascii")) == checkpoint


def test_a_forbidden_token_has_a_logprob_of_minus_infinity() -> None:
    logprobs = (TokenLogprobs(1, -math.inf, ()),)
    checkpoint = TokenCheckpoint("a", 1, (SequenceCheckpoint((1,), logprobs),))
    assert decode_checkpoint(encode_checkpoint(checkpoint).encode()) == checkpoint


@pytest.mark.parametrize(
    "value",
    [
        None, [], 3, {}, {"identity": 1, "seed": "1", "sequences": []}, {"identity": "a", "seed": 1, "sequences": []},
        {"identity": "a", "seed": "x", "sequences": []}, {"identity": "a", "seed": "1", "sequences": 3},
        {"identity": "a", "seed": "1", "sequences": [[1]]},
        {"identity": "a", "seed": "1", "sequences": [[[1.5], None]]},
        {"identity": "a", "seed": "1", "sequences": [[[True], None]]},
        {"identity": "a", "seed": "1", "sequences": [[[1], [[1, float("nan"), []]]]]},
        {"identity": "a", "seed": "1", "sequences": [[[1], [[1, -0.5]]]]},
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_checkpoint(json.dumps(value).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"identity": "a"'])
def test_bytes_that_are_no_json_are_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_checkpoint(raw)
