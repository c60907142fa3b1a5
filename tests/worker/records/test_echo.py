"""Lines with echo, from the line over a small model to the record as the official client reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion

from engine.engine import Engine
from engine.errors import PromptTooLong
from engine.text.tokenizer import Tokenizer
from settings import ModelSettings
from tests.support.build_request import build_request
from tests.support.engines import load_engine, run_all
from tests.support.request_lines import completion_line, parse
from tests.support.tiny_checkpoint import make_checkpoint
from worker.requests.served_model import PromptEchoes, ServedModel

TEXT = "you are the \U0001f642 and<|im_end|> the"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Service:
    """Lines to `choices`, and to the whole body."""

    def __init__(self, path: Path) -> None:
        self.engine: Engine = load_engine(make_checkpoint(path, "qwen3"))
        self.served = ServedModel(self.engine, ModelSettings(name="m"))

    def body(self, **parameters: object) -> dict[str, Any]:
        line = parse(completion_line(**{**GREEDY, **parameters}))
        output = run_all(self.engine, [build_request(self.served.requests, line)])["r"]
        record, _ = self.served.records("j", created_s=1).of_output(line, output)
        response: Any = record["response"]
        body: dict[str, Any] = response["body"]
        return body

    def choice(self, **parameters: object) -> dict[str, Any]:
        (choice,) = self.body(**parameters)["choices"]
        found: dict[str, Any] = choice
        return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(tmp_path_factory.mktemp("echo") / "tiny")


def test_the_prompt_comes_before_its_continuation(service: Service) -> None:
    plain = service.choice(prompt=TEXT, max_tokens=5)
    echoed = service.choice(prompt=TEXT, max_tokens=5, echo=True)

    assert echoed == {**plain, "text": TEXT + plain["text"]}


def test_a_scored_prompt_is_openais_completion(service: Service) -> None:
    body = service.body(prompt=TEXT, max_tokens=0, echo=True, logprobs=2, model="m")
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    prompt_ids = service.engine.tokenizer.encode(TEXT)

    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == len(prompt_ids)
    assert body["usage"]["completion_tokens"] == 0
    assert logprobs["tokens"] == [service.engine.tokenizer.token_text(token_id) for token_id in prompt_ids]
    assert {len(column) for column in logprobs.values()} == {len(prompt_ids)}
    # The types do not know the nulls that the service sends for a first token; programs read them as they come.
    assert (logprobs["token_logprobs"].pop(0), logprobs["top_logprobs"].pop(0)) == (None, None)
    assert Completion.model_validate(body, strict=True).choices[0].text == TEXT
    assert {len(top) for top in logprobs["top_logprobs"]} <= {2, 3}
    pairs = zip(logprobs["tokens"][1:], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    assert all(top[token] >= logprob for token, logprob, top in pairs)


def test_offsets_say_where_each_token_begins_in_the_text(service: Service) -> None:
    choice = service.choice(prompt=TEXT, max_tokens=3, echo=True, logprobs=0)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]

    assert len(tokens) == len(offsets) == len(service.engine.tokenizer.encode(TEXT)) + 3
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or choice["text"].startswith(token, offset)
    smile = TEXT.index("\U0001f642")
    assert offsets.count(smile) >= 2  # bytes of one character begin together
    assert offsets[-3] == len(TEXT)


def test_a_text_scores_as_it_does_in_the_middle_of_another(service: Service) -> None:
    """What programs do that compare answers: the log-probability of an ending behind a context."""
    context, ending = "you are the", " and you"
    scored = service.choice(prompt=context + ending, max_tokens=1, echo=True, logprobs=1)["logprobs"]
    cut = [position for position, offset in enumerate(scored["text_offset"]) if offset >= len(context)][:-1]

    assert "".join(scored["tokens"][position] for position in cut) == ending
    generated = service.choice(prompt=context, max_tokens=1, logprobs=1)["logprobs"]["top_logprobs"][0]
    best = max(scored["top_logprobs"][cut[0]].values())
    assert best == pytest.approx(max(generated.values()), abs=1e-4)


def test_token_ids_come_back_as_their_text_without_special_tokens(service: Service) -> None:
    tokenizer = service.engine.tokenizer
    prompt = [*tokenizer.encode("<|im_end|>"), *tokenizer.encode(" the and")]
    choice = service.choice(prompt=prompt, max_tokens=0, echo=True, logprobs=0)

    assert choice["text"] == " the and"
    assert choice["logprobs"]["tokens"] == ["<|im_end|>", " the", " and"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 4]


def test_each_of_several_completions_has_the_prompt(service: Service) -> None:
    body = service.body(prompt=TEXT, max_tokens=2, echo=True, logprobs=1, n=2, temperature=1, seed=4)
    first, second = body["choices"]
    length = len(service.engine.tokenizer.encode(TEXT))

    assert first["text"].startswith(TEXT)
    assert second["text"].startswith(TEXT)
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert first["logprobs"][column][:length] == second["logprobs"][column][:length]
        assert len(second["logprobs"][column]) == length + 2


def test_a_prompt_alone_may_be_as_long_as_the_context(service: Service) -> None:
    prompt = [5] * service.engine.max_model_len
    line = parse(completion_line(prompt=prompt, max_tokens=0, echo=True))

    build_request(service.served.requests, line)
    with pytest.raises(PromptTooLong):
        build_request(service.served.requests, parse(completion_line(prompt=prompt, max_tokens=1, echo=True)))


def test_what_a_tokenizer_puts_before_a_text_takes_no_room_in_it(service: Service) -> None:
    tokenizer: Tokenizer = service.engine.tokenizer
    (mark,) = tokenizer.encode("<|im_start|>")
    offsets = PromptEchoes(tokenizer)._offsets(" the<|im_end|>", [mark, *tokenizer.encode(" the<|im_end|>")])

    assert list(offsets) == [0, 0, 4]
