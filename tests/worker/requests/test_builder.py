"""From a line to an engine request, and the name a model goes by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import Request
from engine.structured.grammar import Grammar
from engine.text.tokenizer import Tokenizer
from settings import ModelSettings, SettingsError
from tests.support.fake_engine import served_model, template_source
from tests.support.request_lines import build_request, chat_line, completion_line, parse, raw_line
from tests.support.tiny_tokenizer import THINKING, build_sentencepiece_tokenizer, make_tokenizer
from worker.lines.request_line import RequestLine
from worker.requests.builder import RequestBuilder
from worker.requests.served_model import served_model_name

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if thinking %}think{% endif %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('begins with a tool') }}{% endif %}"
)


def tokenizer_at(path: Path, template: str | None) -> Tokenizer:
    make_tokenizer(path)
    config_path = path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    if template is None:
        del config["chat_template"]
    else:
        config["chat_template"] = template
    config_path.write_text(json.dumps(config))
    return Tokenizer.from_directory(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_at(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.fixture
def builder(tokenizer: Tokenizer) -> RequestBuilder:
    return served_model(tokenizer, max_model_len=64, name="tiny").requests


def build(builder: RequestBuilder, line: RequestLine, request_id: str, *, tenant: str = "") -> Request:
    """The engine request of a line that generates."""
    request = build_request(builder, line, request_id, tenant=tenant)
    assert isinstance(request, Request)
    return request


def test_a_text_prompt_is_tokenised(builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    request = build(builder, parse(completion_line()), "r1", tenant="t")

    assert list(request.prompt_token_ids) == tokenizer.encode("hello")
    assert (request.request_id, request.tenant) == ("r1", "t")


def test_token_ids_are_taken_as_they_are(builder: RequestBuilder) -> None:
    assert list(build(builder, parse(raw_line({"prompt": [3, 1]})), "r").prompt_token_ids) == [3, 1]


def test_a_conversation_goes_through_the_template(builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    request = build(builder, parse(chat_line(chat_template_kwargs={"thinking": True})), "r")

    assert tokenizer.decode(list(request.prompt_token_ids)) == "<user>hellothink"


def test_a_completion_gets_16_tokens_unless_told(builder: RequestBuilder) -> None:
    assert build(builder, parse(completion_line()), "r").params.max_tokens == 16
    assert build(builder, parse(completion_line(max_tokens=3)), "r").params.max_tokens == 3


def test_a_completion_near_the_end_of_the_context_gets_what_is_left(builder: RequestBuilder) -> None:
    assert build(builder, parse(raw_line({"prompt": [1] * 60})), "r").params.max_tokens == 4


def test_a_chat_gets_what_the_context_leaves(builder: RequestBuilder) -> None:
    assert build(builder, parse(chat_line()), "r").params.max_tokens is None
    assert build(builder, parse(chat_line(max_completion_tokens=9)), "r").params.max_tokens == 9


def test_where_an_answer_ends_and_what_comes_back_reaches_the_engine(builder: RequestBuilder) -> None:
    given = {"min_tokens": 2, "n": 2, "stop": "x", "stop_token_ids": [9], "ignore_eos": True, "logprobs": 2}
    params = build(builder, parse(completion_line(**given, logit_bias={"5": -1})), "r").params

    assert (params.min_tokens, params.n, params.stop, params.stop_token_ids) == (2, 2, ("x",), (9,))
    assert (params.ignore_eos, params.logprobs, params.logit_bias) == (True, 2, {5: -1.0})


@pytest.mark.parametrize("line", [completion_line, chat_line])
def test_tokens_that_alone_are_allowed_reach_the_engine(builder: RequestBuilder, line: Callable[..., bytes]) -> None:
    assert build(builder, parse(line(allowed_token_ids=[5, 3])), "r").params.allowed_token_ids == (5, 3)
    assert build(builder, parse(line()), "r").params.allowed_token_ids == ()


@pytest.mark.parametrize("line", [completion_line, chat_line])
def test_choices_that_are_scored_reach_the_engine_as_tokens(
    builder: RequestBuilder, tokenizer: Tokenizer, line: Callable[..., bytes]
) -> None:
    choices = ["hello", "hello there", "\u00e9"]
    request = build(builder, parse(line(guided_choice=choices, choice_logprobs=True)), "r")
    assert [tokenizer.decode(token_ids) for token_ids in request.continuations] == choices
    assert request.continuations[0] == tokenizer.encode("hello", add_special_tokens=False)
    assert build(builder, parse(line(guided_choice=choices)), "r").continuations == ()
    other = parse(line(guided_choice=["a", "b"], choice_logprobs=True))
    assert [tokenizer.decode(token_ids) for token_ids in build(builder, other, "r").continuations] == ["a", "b"]


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_scored_choice_has_no_space_that_a_tokenizer_would_put_before_it(metaspace: bool) -> None:
    tokenizer = Tokenizer(build_sentencepiece_tokenizer(metaspace=metaspace), None)
    builder = served_model(tokenizer, max_model_len=64, name="tiny").requests
    line = completion_line(guided_choice=["ab", " ab"], choice_logprobs=True)
    written = [b"".join(map(tokenizer.token_bytes, ids)) for ids in build(builder, parse(line), "r").continuations]
    assert written == [b"ab", b" ab"]


def test_only_the_text_of_a_text_completion_goes_on(builder: RequestBuilder) -> None:
    assert build(builder, parse(completion_line()), "r").goes_on
    assert not build(builder, parse(chat_line()), "r").goes_on


OFF: dict[str, object] = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("template", "given", "fits"),
    [("parts", {}, False), (THINKING, {}, False), (THINKING, OFF, True), (TEMPLATE, {}, True)],
    ids=["open", "may begin", "switched off", "none"],
)
def test_choices_are_scored_only_where_an_answer_stands_behind_the_prompt(
    tmp_path: Path, template: str, given: dict[str, object], fits: bool
) -> None:
    tokenizer = tokenizer_at(tmp_path, template_source(template) if template == "parts" else template)
    builder = served_model(tokenizer, max_model_len=4096, name="tiny").requests
    line = parse(chat_line(guided_choice=["a"], choice_logprobs=True, **given))
    if fits:
        assert len(build(builder, line, "r").continuations) == 1
        return
    with pytest.raises(InvalidRequest, match="reasons before it answers") as caught:
        build(builder, line, "r")
    assert caught.value.param == "choice_logprobs"


def test_a_scored_choice_beyond_the_context_is_refused_by_name(builder: RequestBuilder) -> None:
    line = raw_line({"prompt": [1] * 60, "guided_choice": ["a", "a" * 9], "choice_logprobs": True})
    with pytest.raises(PromptTooLong) as caught:
        build(builder, parse(line), "r")
    assert caught.value.param == "choice_logprobs"


def test_a_grammar_reaches_the_engine_with_the_name_of_its_parameter(builder: RequestBuilder) -> None:
    grammar = build(builder, parse(completion_line(guided_regex="a+")), "r").params.grammar

    assert grammar == Grammar("regex", "a+")
    assert grammar.param == "guided_regex"


@pytest.mark.parametrize("params", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_what_would_move_the_end_of_a_grammar_is_refused(builder: RequestBuilder, params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(builder, parse(completion_line(guided_regex="a+", **params)), "r")
    assert [caught.value.param] == list(params)


def test_top_k_minus_one_is_off(builder: RequestBuilder) -> None:
    assert build(builder, parse(completion_line(top_k=-1)), "r").params.top_k == 0


@pytest.mark.parametrize("name", ["tiny", "org/tiny", None])
def test_the_models_name_is_accepted(builder: RequestBuilder, name: str | None) -> None:
    assert build(builder, parse(completion_line(model=name)), "r").request_id == "r"


def test_another_models_name_is_refused(builder: RequestBuilder) -> None:
    with pytest.raises(InvalidRequest, match="model is 'gpt-4o'; accepted: 'tiny'") as raised:
        build(builder, parse(completion_line(model="gpt-4o")), "r")

    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")


def test_a_conversation_longer_than_the_context_names_need_and_capacity(builder: RequestBuilder) -> None:
    line = parse(raw_line({"messages": [{"role": "user", "content": "x" * 100}]}))

    with pytest.raises(PromptTooLong) as raised:
        build(builder, line, "r")

    assert (raised.value.param, raised.value.capacity) == ("messages", 64)
    assert raised.value.need > 100


@pytest.mark.parametrize("prompt", ["x " * 100, [1] * 64])
def test_a_prompt_longer_than_the_context_names_need_and_capacity(builder: RequestBuilder, prompt: object) -> None:
    with pytest.raises(PromptTooLong) as raised:
        build(builder, parse(raw_line({"prompt": prompt})), "r")

    assert (raised.value.param, raised.value.capacity) == ("prompt", 64)
    assert raised.value.need > 64


def test_a_prompt_that_leaves_room_for_one_token_is_built(builder: RequestBuilder) -> None:
    assert build(builder, parse(raw_line({"prompt": [1] * 63})), "r").params.max_tokens == 1


def test_a_tools_answer_in_the_history_goes_through_the_template(builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    history = [{"role": "user", "content": "2+2?"}, {"role": "tool", "tool_call_id": "c", "content": "4"}]

    request = build(builder, parse(raw_line({"messages": history})), "r")

    assert tokenizer.decode(list(request.prompt_token_ids)) == "<user>2+2?<tool>4"


def test_min_tokens_above_max_tokens_is_refused(builder: RequestBuilder) -> None:
    with pytest.raises(InvalidRequest) as raised:
        build(builder, parse(completion_line(min_tokens=5, max_tokens=4)), "r")

    assert raised.value.param == "min_tokens"


def test_a_model_without_a_template_takes_prompts_only(tmp_path: Path) -> None:
    builder = served_model(tokenizer_at(tmp_path / "plain", None), max_model_len=64, name="tiny").requests

    with pytest.raises(InvalidRequest, match="chat template") as raised:
        build(builder, parse(chat_line()), "r")

    assert raised.value.param == "messages"
    assert build(builder, parse(completion_line()), "r").request_id == "r"


def test_what_the_template_refuses_is_the_requests_fault(builder: RequestBuilder) -> None:
    line = parse(raw_line({"messages": [{"role": "tool", "content": "1", "tool_call_id": "c"}]}))

    with pytest.raises(InvalidRequest, match="begins with a tool") as raised:
        build(builder, line, "r")

    assert raised.value.param == "messages"


def test_a_template_argument_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    builder = served_model(tokenizer_at(tmp_path / "bare", template), max_model_len=64, name="tiny").requests

    with pytest.raises(InvalidRequest) as raised:
        build(builder, parse(chat_line(chat_template_kwargs={"thinking": True})), "r")

    assert raised.value.param == "chat_template_kwargs.thinking"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "strftime_now"])
def test_template_arguments_of_our_own_cannot_be_replaced(builder: RequestBuilder, name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        build(builder, parse(chat_line(chat_template_kwargs={name: "x"})), "r")

    assert raised.value.param == f"chat_template_kwargs.{name}"


def test_requests_built_together_are_those_built_one_by_one(builder: RequestBuilder) -> None:
    raw_lines = [
        completion_line(),
        chat_line(seed=7),
        raw_line({"prompt": [3, 1]}),
        completion_line(prompt="the you are", max_tokens=5),
        chat_line(chat_template_kwargs={"thinking": True}),
    ]
    lines = [(parse(raw, index), f"r{index}") for index, raw in enumerate(raw_lines)]

    together = builder.build_all(lines, created_s=0, tenant="t")

    assert together == [build(builder, line, name, tenant="t") for line, name in lines]


def test_a_bad_line_among_others_is_refused_alone_and_in_its_place(builder: RequestBuilder) -> None:
    raw_lines = [
        completion_line(),
        completion_line(model="other"),
        chat_line(messages=[{"role": "tool", "content": "x"}]),
        completion_line(prompt="!" * 64),
        chat_line(),
    ]
    built = builder.build_all([(parse(raw, index), f"r{index}") for index, raw in enumerate(raw_lines)], created_s=0)

    assert [type(item) for item in built] == [Request, InvalidRequest, InvalidRequest, PromptTooLong, Request]
    assert "begins with a tool" in str(built[2])


def test_a_text_that_the_tokeniser_refuses_leaves_its_neighbours_alone(
    builder: RequestBuilder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tokenizer.encode

    def refusing(text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "bad" in text:
            raise ValueError("not this one")
        return encode(text, add_special_tokens=add_special_tokens)

    def refusing_batch(texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [refusing(text, add_special_tokens=add_special_tokens) for text in texts]

    monkeypatch.setattr(tokenizer, "encode", refusing)
    monkeypatch.setattr(tokenizer, "encode_batch", refusing_batch)
    lines = [(parse(completion_line(prompt=prompt)), prompt) for prompt in ("a", "bad", "b")]

    first, second, third = builder.build_all(lines, created_s=0)

    assert isinstance(second, ValueError)
    assert [first, third] == [build(builder, line, name) for line, name in (lines[0], lines[2])]


def test_a_model_is_named_by_the_settings_else_by_its_directory(tmp_path: Path) -> None:
    assert served_model_name(ModelSettings(name="good", path=Path("/models/tiny"))) == "good"
    assert served_model_name(ModelSettings(path=tmp_path / "x" / ".." / "tiny")) == "tiny"
    assert served_model_name(ModelSettings(root=tmp_path, path=Path("tiny"))) == "tiny"
    assert served_model_name(ModelSettings()) == "millrace"


@pytest.mark.parametrize(
    ("aliases", "name", "is_accepted"),
    [
        ("gpt-4o-mini, gpt-5", "gpt-5", True),
        ("gpt-4o-mini", "openai/gpt-4o-mini", True),
        ("gpt-4o-mini", "gpt-5", False),
        ("*", "gpt-5", True),
        (None, "tiny", True),
    ],
)
def test_lines_may_give_an_alias(tokenizer: Tokenizer, aliases: str | None, name: str, is_accepted: bool) -> None:
    builder = served_model(tokenizer, max_model_len=64, name="tiny", aliases=aliases).requests
    [built] = builder.build_all([(parse(completion_line(model=name)), "r")], created_s=0)
    assert isinstance(built, Request) is is_accepted


def test_a_directory_outside_of_the_root_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.path"):
        served_model_name(ModelSettings(root=tmp_path, path=Path("/etc")))
