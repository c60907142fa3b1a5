"""Well-formed lines at the edge of what a line may say, on a real engine beside an innocent one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from settings import ModelSettings, load_settings
from tests.support.engines import load_decoder_engine
from tests.support.request_lines import raw_line
from worker.offline import LineFeed, OfflineRun

MAX_MODEL_LEN = 256
INNOCENT = raw_line({"custom_id": "innocent", "prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True})

# What a line says -> whether it is answered (or refused, with the parameter it names).
EXTREMES: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": 0}, None),
    ({"temperature": 1e-5, "seed": 1}, None),
    ({"temperature": 1e4}, None),
    ({"temperature": 5e-324}, "temperature"),
    ({"temperature": 1e-45}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 5e-324}, None),
    ({"top_p": 1e-45}, None),
    ({"top_p": 1e-9, "temperature": 5.0}, None),
    ({"min_p": 1.0}, None),
    ({"top_k": 2**31 - 1}, None),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"repetition_penalty": 0.01}, None),
    ({"repetition_penalty": 100, "logit_bias": {"5": 100}}, None),
    ({"repetition_penalty": 100, "temperature": 1e-5, "logprobs": 20}, None),
    ({"repetition_penalty": 0.01, "temperature": 1e-5, "min_p": 0.5}, None),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"repetition_penalty": 1e300, "logprobs": 5, "min_p": 0.5}, "repetition_penalty"),
    ({"presence_penalty": 2, "frequency_penalty": 2, "temperature": 1e-5}, None),
    ({"presence_penalty": -2, "frequency_penalty": -2, "temperature": 1e4}, None),
    ({"logit_bias": {"5": 100}}, None),
    ({"logit_bias": {str(token_id): -100 for token_id in range(300)}}, None),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999"),
    ({"logit_bias": {"2147483647": 1}}, "logit_bias"),
    ({"seed": -(2**63)}, None),
    ({"seed": 2**63 - 1, "n": 8}, None),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 20}, None),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 10**4000}, "max_tokens"),
    ({"max_tokens": 2**31 - 1}, "max_tokens"),
    ({"max_tokens": None, "ignore_eos": True}, None),
    ({"min_tokens": 2**31 - 1, "max_tokens": 2**31 - 1}, "min_tokens"),
    ({"min_tokens": 4, "stop_token_ids": list(range(250))}, None),
    ({"stop_token_ids": [10**20]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ({"stop": ["\x00"]}, None),
    ({"stop": ["a" * 100_000]}, None),
    ({"stop": [" "] * 16}, None),
    ({"prompt": "\x00"}, None),
    ({"prompt": "\ud7ff\uffff"}, None),
    ({"prompt": " " * 200_000}, "prompt"),
    ({"prompt": [1] * (MAX_MODEL_LEN - 1), "max_tokens": 1}, None),
    ({"prompt": [1] * MAX_MODEL_LEN}, "prompt"),
    ({"prompt": [2**31 - 1]}, "prompt"),
    ({"prompt": [2**63]}, "prompt[0]"),
    ({"prompt": [10**4200]}, "prompt[0]"),
]


def raw_extreme(values: dict[str, Any]) -> bytes:
    return raw_line({"custom_id": "extreme", "prompt": "hello world", "max_tokens": 4, **values})


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    overrides = {
        "model.path": str(tiny_model),
        "engine.device": "cpu",
        "engine.num_threads": "1",
        "engine.max_model_len": str(MAX_MODEL_LEN),
    }
    return load_decoder_engine(load_settings(overrides, environ={}, dotenv_path=Path(os.devnull)))


def run(engine: Engine, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The lines' records, as they would be written."""
    records: list[dict[str, Any]] = []
    limits = engine.settings.limits
    offline = OfflineRun(engine, ModelSettings(name="m"), window=64, write=lambda record: records.append({**record}))
    feed = LineFeed(lines, limits, capacity=64, by_prefix=True)
    feed.start()
    offline.run(feed, lambda: False, lambda: None)
    return [json.loads(json.dumps(record, allow_nan=False)) for record in records]


def choices_of(records: Sequence[dict[str, Any]], custom_id: str) -> Any:
    [body] = [record["response"]["body"] for record in records if record["custom_id"] == custom_id]
    return body["choices"]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Any:
    """What the innocent line is answered when nothing else runs."""
    return choices_of(run(engine, [INNOCENT]), "innocent")


@pytest.mark.parametrize(("values", "param"), EXTREMES, ids=lambda value: str(value)[:50])
def test_an_extreme_line_is_answered_or_refused_and_its_neighbour_runs(
    engine: Engine, alone: Any, values: dict[str, Any], param: str | None
) -> None:
    records = run(engine, [raw_extreme(values), INNOCENT])

    assert len(records) == 2
    assert choices_of(records, "innocent") == alone
    [extreme] = [record["response"] for record in records if record["custom_id"] == "extreme"]
    if param is None:
        assert extreme["status_code"] == 200, extreme["body"]
    else:
        error = extreme["body"]["error"]
        assert (extreme["status_code"], error["param"]) == (400, param)
        assert len(error["message"]) < 200


def test_all_extreme_lines_together_get_one_record_each(engine: Engine, alone: Any) -> None:
    records = run(
        engine, [INNOCENT, *(raw_extreme({**values, "custom_id": f"{i}"}) for i, (values, _) in enumerate(EXTREMES))]
    )

    assert sorted(record["custom_id"] for record in records) == sorted(["innocent", *map(str, range(len(EXTREMES)))])
    assert choices_of(records, "innocent") == alone
