"""Lines that say what their answers must look like, through `OfflineRun` and a whole engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from settings import LimitSettings, ModelSettings
from tests.support.engines import load_engine
from tests.support.grammars import POINT, SLOW_SCHEMA
from tests.support.request_lines import chat_line, completion_line
from worker.offline import LineFeed, OfflineRun

FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
LIMITS = {"engine.structured_output.compile_timeout_s": "0.5", "engine.structured_output.max_grammar_bytes": "1000"}


def _run(model: Path, lines: list[bytes]) -> dict[str, Mapping[str, Any]]:
    records: list[Mapping[str, Any]] = []
    engine = load_engine(model, LIMITS)
    feed = LineFeed(lines, LimitSettings(), capacity=16, by_prefix=True)
    feed.start()
    OfflineRun(engine, ModelSettings(name="m"), window=16, write=records.append).run(feed, lambda: False, lambda: None)
    engine.close()
    return {record["custom_id"]: record["response"] for record in records}


def test_answers_have_the_form_their_lines_ask_for_and_bad_forms_fail_their_lines_alone(tiny_model: Path) -> None:
    common: dict[str, Any] = {"max_tokens": 150, "seed": 3}
    choice, regex = ["the", "you"], "[ab]{2}[0-9]{3}"
    answers = _run(
        tiny_model,
        [
            chat_line(custom_id="chat", response_format=FORMAT, **common),
            completion_line(custom_id="json", guided_json=json.dumps(POINT), **common),
            completion_line(custom_id="choice", guided_choice=choice, **common),
            completion_line(custom_id="regex", structured_outputs={"regex": regex}, **common),
            completion_line(custom_id="rules", guided_grammar='root ::= "a" | "b" root', **common),
            completion_line(custom_id="free", **common),
            chat_line(
                custom_id="not",
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
                **common,
            ),
            completion_line(custom_id="large", guided_regex="a" * 2000, **common),
            completion_line(custom_id="slow", guided_json=SLOW_SCHEMA, **common),
            completion_line(custom_id="contradiction", guided_regex="a", ignore_eos=True, **common),
        ],
    )
    texts = {
        name: answer["body"]["choices"][0].get("text") or answer["body"]["choices"][0]["message"]["content"]
        for name, answer in answers.items()
        if answer["status_code"] == 200
    }
    assert texts.keys() == {"chat", "json", "choice", "regex", "rules", "free"}
    assert json.loads(texts["chat"]).keys() == json.loads(texts["json"]).keys() == {"x", "y"}
    assert texts["choice"] in choice
    assert re.fullmatch(regex, texts["regex"])
    assert re.fullmatch("b*a", texts["rules"])
    errors = {name: answer["body"]["error"] for name, answer in answers.items() if answer["status_code"] == 400}
    assert {name: (error["type"], error["code"], error["param"]) for name, error in errors.items()} == {
        "not": ("invalid_request_error", "invalid_grammar", "response_format"),
        "large": ("invalid_request_error", "grammar_too_large", "guided_regex"),
        "slow": ("invalid_request_error", "grammar_too_complex", "guided_json"),
        "contradiction": ("invalid_request_error", "invalid_value", "ignore_eos"),
    }
