from __future__ import annotations

import pytest

from engine.request import AnyRequest, EmbeddingRequest, Request
from engine.sampling_params import SamplingParams
from worker.requests.step_engine import request_room


@pytest.mark.parametrize(
    ("request_", "room"),
    [
        (Request("r", [1, 2], SamplingParams()), 1),
        (Request("r", [1, 2], SamplingParams(n=3)), 3),
        (EmbeddingRequest("r", [[1], [2, 3]]), 2),
    ],
)
def test_a_request_takes_the_room_of_its_sequences(request_: AnyRequest, room: int) -> None:
    assert request_room(request_) == room
