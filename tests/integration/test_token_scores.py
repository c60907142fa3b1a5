"""Rerankers that answer yes or no as a token (Qwen3-Reranker): scores by the command line, against transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint.classifier_config import ClassifierConfig, PairForm, TokenLogit
from engine.checkpoint.model_config import read_config
from engine.errors import CheckpointError, InvalidRequest
from engine.text.tokenizer import Tokenizer
from settings import load_settings
from tests.support.request_lines import error_body, read_records
from tests.support.tiny_checkpoint import make_bert_checkpoint, make_checkpoint
from tests.support.tiny_families import Family
from tests.support.workers import ONE_THREAD
from worker.cli.run import run
from worker.doctor.model import model_findings
from worker.requests.pair_prompts import PairPrompts

TOLERANCE = 1e-4
QUERY = "where does the water go"
DOCUMENTS = ["to the mill", "a", "", "it goes over the wheel, and then on to the sea!", "nobody knows 2"]
LIMIT = 240  # tokens
LONG = "over the wheel " * 20
YES, NO = 93, 72
# What Qwen3-Reranker was trained on, shorter; content is a text or a list of one part.
TEMPLATE = """\
{%- macro text(m) %}{{ m.content if m.content is string else m.content[0].text }}{% endmacro %}
{%- set ns = namespace(task='find what answers') %}
{%- for m in messages if m.role == 'system' %}{% set ns.task = text(m) %}{% endfor -%}
<|im_start|>system
Judge{{ mood }}.<|im_end|>
<|im_start|>user
<Instruct>: {{ ns.task }}
{%- for m in messages if m.role == 'query' %}
<Query>: {{ text(m) }}
{%- endfor %}
{%- for m in messages if m.role == 'document' %}
<Document>: {{ text(m) }}
{%- endfor %}<|im_end|>
{% if add_generation_prompt %}<|im_start|>assistant
<think>

</think>

{% endif %}"""
FORWARD = {"method": "forward", "method_output_name": "logits"}
IDENTITY = "torch.nn.modules.linear.Identity"


def write_json(file: Path, data: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(data))


def add_keys(file: Path, keys: Mapping[str, object]) -> None:
    write_json(file, json.loads(file.read_text()) | dict(keys))


def write_modules(path: Path, transformer: Mapping[str, object], saved: Mapping[str, object], **ids: int) -> None:
    """The files that sentence-transformers saves of a CrossEncoder of a causal model."""
    package = "sentence_transformers"
    kinds = [
        f"{package}.base.modules.transformer.Transformer",
        f"{package}.cross_encoder.modules.logit_score.LogitScore",
    ]
    paths = ["", "1_LogitScore"]
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": kind}
        for index, (folder, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    write_json(path / "modules.json", modules)
    write_json(path / "1_LogitScore" / "config.json", {**ids, "module_input_name": "causal_logits"})
    task = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
    write_json(path / "sentence_bert_config.json", task | dict(transformer))
    write_json(path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", **saved})


def by_module(path: Path) -> None:
    """Two tokens, a prompt for every pair, logits as they are."""
    (path / "chat_template.jinja").write_text(TEMPLATE)
    transformer = {
        "modality_config": {"text": FORWARD, "message": {**FORWARD, "format": "flat"}},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True, "mood": " well"}},
    }
    saved = {"prompts": {"web": "search the web"}, "default_prompt_name": "web", "activation_fn": IDENTITY}
    write_modules(path, transformer, saved, true_token_id=YES, false_token_id=NO)


def by_one_token(path: Path) -> None:
    """One token, content in parts, no prompt and no activation named."""
    (path / "chat_template.jinja").write_text(TEMPLATE)
    transformer = {"modality_config": {"text": FORWARD, "message": {**FORWARD, "format": "structured"}}}
    write_modules(path, transformer, {}, true_token_id=YES)


def by_pair(path: Path) -> None:
    """A module whose model is given texts alone, whatever chat template it has."""
    write_modules(path, {"modality_config": {"text": FORWARD}}, {}, true_token_id=YES, false_token_id=NO)


def by_keys(path: Path) -> None:
    """As vLLM loads Qwen3-Reranker, with its template."""
    (path / "chat_template.jinja").write_text(TEMPLATE)
    keys = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    add_keys(path / "config.json", {**keys, "classifier_from_token": names_of(path, NO, YES)})


def by_method(path: Path) -> None:
    """As vLLM loads bge-reranker-v2-gemma: one token, two texts joined, and a chat template of no use for them."""
    keys = {"method": "no_post_processing", "classifier_from_token": names_of(path, YES)}
    add_keys(path / "config.json", keys)


def names_of(path: Path, *token_ids: int) -> list[str]:
    names: list[str] = AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(list(token_ids))
    return names


@dataclass(frozen=True)
class Case:
    family: Family
    options: Mapping[str, Any]
    write: Callable[[Path], None]
    ids: tuple[int, int | None]  # of the token that counts for a pair, and against it
    template: Mapping[str, Any] | None = None  # what transformers' template is given beside the messages; None: none
    task: str | None = None
    parts: bool = False
    activation: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid


CASES = {
    "module": Case(
        "qwen3",
        {"tie_word_embeddings": True},
        by_module,
        (YES, NO),
        {"add_generation_prompt": True, "mood": " well"},
        task="search the web",
        activation=lambda logits: logits,
    ),
    "module, one token": Case("llama", {}, by_one_token, (YES, None), {}, parts=True),
    "module, pairs": Case("granite", {"logits_scaling": 4.0}, by_pair, (YES, NO)),
    "keys": Case("qwen3", {}, by_keys, (YES, NO), {}),
    "method": Case("mistral", {"tie_word_embeddings": True}, by_method, (YES, None)),
}


def make(path: Path, case: Case) -> Path:
    make_checkpoint(path, case.family, **case.options)
    case.write(path)
    return path


class Reference:
    """transformers' logits behind a pair's last token."""

    def __init__(self, path: Path, case: Case) -> None:
        self._case = case
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def token_ids(self, query: str, document: str) -> list[int]:
        case = self._case
        if case.template is None:
            ids: list[int] = self._tokenizer(query + document if case.write is by_method else query)["input_ids"]
            return ids if case.write is by_method else ids + self._tokenizer(document)["input_ids"]
        texts = [("query", query), ("document", document)]
        given = ([("system", case.task)] if case.task else []) + texts
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if case.parts else text} for role, text in given
        ]
        found: list[int] = self._tokenizer.apply_chat_template(messages, return_dict=True, **case.template)["input_ids"]
        return found

    @torch.inference_mode()
    def logit(self, token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0, -1]
        yes, no = self._case.ids
        return logits[yes] if no is None else logits[yes] - logits[no]


def run_lines(path: Path, *bodies: tuple[str, str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The records of `millrace run`, by custom_id."""
    lines = [json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) for name, url, body in bodies]
    requests, results = path.parent / "requests.jsonl", path.parent / "results.jsonl"
    requests.write_text("\n".join(lines) + "\n")
    done = CliRunner().invoke(run, ["-i", str(requests), "-o", str(results), "--model", str(path), *ONE_THREAD])
    assert done.exit_code == 0, done.output
    return {record["custom_id"]: record for record in read_records(results)}


@pytest.mark.parametrize("name", CASES)
def test_scores_are_transformers_logits_of_the_tokens(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = make(tmp_path / "model", case)
    pair = {"text_1": QUERY, "text_2": DOCUMENTS}
    records = run_lines(
        path,
        ("score", "/v1/score", pair),
        ("logits", "/v1/score", {**pair, "use_activation": False}),
        ("rerank", "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 3}),
        ("cut", "/v1/score", {"text_1": QUERY, "text_2": LONG, "truncate_prompt_tokens": LIMIT}),
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("text", "/classify", {"input": QUERY, "use_activation": False}),
    )
    reference = Reference(path, case)
    logits = torch.stack([reference.logit(reference.token_ids(QUERY, document)) for document in DOCUMENTS])

    def found(line: str) -> torch.Tensor:
        assert error_body(records[line]) is None, records[line]
        return torch.tensor([item["score"] for item in records[line]["response"]["body"]["data"]])

    torch.testing.assert_close(found("score"), case.activation(logits), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(found("logits"), logits, atol=TOLERANCE, rtol=0)
    ranked = records["rerank"]["response"]["body"]["results"]
    assert [item["index"] for item in ranked] == logits.sort(descending=True).indices[:3].tolist()
    refused = error_body(records["chat"])
    assert refused is not None
    assert refused["code"] == "unsupported_endpoint"
    (alone,) = records["text"]["response"]["body"]["data"]
    expected = reference.logit(AutoTokenizer.from_pretrained(path)(QUERY)["input_ids"])
    torch.testing.assert_close(torch.tensor(alone["probs"][0]), expected, atol=TOLERANCE, rtol=0)
    if case.template is not None:
        whole, behind = reference.token_ids(QUERY, LONG), num_behind(reference)
        cut = [*whole[: LIMIT - behind], *whole[-behind:]]
        assert len(whole) > LIMIT
        torch.testing.assert_close(found("cut")[0], case.activation(reference.logit(cut)), atol=TOLERANCE, rtol=0)


def num_behind(reference: Reference) -> int:
    """Tokens that the template writes behind a document."""
    first, second = (reference.token_ids("x", text)[::-1] for text in ("3", "x y z"))
    return next(place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])


@pytest.mark.parametrize("name", ["module", "method"])
def test_a_prompt_without_room_for_its_end_is_refused(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / "model", CASES[name])
    body = {"text_1": QUERY, "text_2": "a", "truncate_prompt_tokens": 5}
    good = ("good", "/v1/score", {"text_1": QUERY, "text_2": "a"})
    error = error_body(run_lines(path, ("cut", "/v1/score", body), good)["cut"])
    if name == "method":
        assert error is None
        return
    assert error is not None
    assert error["param"] == "truncate_prompt_tokens"
    assert "tokens that the template writes behind the document" in error["message"]


def test_vllms_template_is_the_models_where_it_names_both_roles(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)  # its chat template writes any role
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert PairPrompts(PairForm("template or joined"), tokenizer).input_of(("a", "b"), "text_2") == "ab"
    shown = PairPrompts(PairForm("template"), tokenizer).input_of(("a", "b"), "text_2")
    assert shown == ("<|im_start|>query\na<|im_end|>\n<|im_start|>document\nb<|im_end|>\n",)
    assert PairPrompts(PairForm("joined"), tokenizer).input_of(("a", "b"), "text_2") == "ab"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "is missing"),
        ("{{ messages[0].content }}", "does not show the document"),
        ("{{ raise_exception('no') }}", "fails on them.*no"),
        ("{{ strftime_now('%Y') }}{{ messages }}", "writes the date"),
    ],
)
def test_a_model_without_a_template_of_pairs_is_refused(tmp_path: Path, template: str | None, said: str) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    write_json(file, {**json.loads(file.read_text()), "chat_template": template})
    with pytest.raises(CheckpointError, match=f"{said}.*accepted: a chat_template.jinja"):
        PairPrompts(PairForm("template"), Tokenizer.from_directory(tmp_path))


def test_a_document_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    template = TEMPLATE + "{% if 'x' in text(messages[1]) %}{{ raise_exception('no x') }}{% endif %}"
    file = tmp_path / "tokenizer_config.json"
    write_json(file, {**json.loads(file.read_text()), "chat_template": template})
    prompts = PairPrompts(PairForm("template"), Tokenizer.from_directory(tmp_path))
    with pytest.raises(InvalidRequest, match=r"documents\[1\]: .*no x") as caught:
        prompts.input_of(("a", "x"), "documents[1]")
    assert caught.value.param == "documents[1]"


@pytest.mark.parametrize("key", ["use_sep_token", "use_pad_token"])
def test_labels_and_tokens_come_from_config_json(tmp_path: Path, key: str) -> None:
    make_checkpoint(tmp_path, "qwen3")
    names = names_of(tmp_path, NO, YES)
    keys = {"classifier_from_token": names, "method": "no_post_processing", key: True}
    add_keys(tmp_path / "config.json", {**keys, "id2label": {"0": "no", "1": "yes"}})
    classifier = read_config(tmp_path).classifier
    assert classifier is not None
    assert classifier == ClassifierConfig(
        ("no", "yes"), "softmax", "sigmoid", None, (TokenLogit(NO), TokenLogit(YES)), PairForm("pair")
    )


@pytest.mark.parametrize(
    ("file", "keys", "said"),
    [
        (
            "1_LogitScore/config.json",
            {"true_token_id": 1_000_000},
            "true_token_id is 1000000; accepted: a token of the",
        ),
        ("1_LogitScore/config.json", {"true_token_id": None}, "true_token_id is missing"),
        (
            "1_LogitScore/config.json",
            {"module_input_name": "scores"},
            "module_input_name is 'scores'; accepted: causal",
        ),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
        ("sentence_bert_config.json", {"transformer_task": None}, "transformer_task is missing"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True"),
        ("sentence_bert_config.json", {"modality_config": {"message": {"format": "auto"}}}, "format is 'auto'"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"padding": 3}}}, "accepted: chat_template only"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"chat_template": {"max_length": 3}}},
            "max_length is 3; accepted: variables that the template",
        ),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"chat_template": {"restore_suffix": False}}},
            "restore_suffix is False; accepted: true",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "no"}, "default_prompt_name is 'no'"),
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.Tanh"}, "activation_fn is 'torch.nn.Tanh'"),
        ("config.json", {"final_logit_softcapping": 3.0}, "final_logit_softcapping caps the logits"),
    ],
)
def test_files_of_a_module_that_cannot_be_run_are_refused(
    tmp_path: Path, file: str, keys: Mapping[str, object], said: str
) -> None:
    make_checkpoint(tmp_path, "gemma2" if file == "config.json" else "qwen3")
    by_module(tmp_path)
    if file == "config.json":
        add_keys(tmp_path / file, {"final_logit_softcapping": None})
        assert read_config(tmp_path).classifier is not None
    add_keys(tmp_path / file, keys)
    with pytest.raises(CheckpointError, match=said):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"classifier_from_token": ["a"]}, "method is missing"),
        ({"classifier_from_token": ["a"], "method": "by_hand"}, "method is 'by_hand'"),
        ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, "accepted: two tokens"),
        ({"classifier_from_token": [], "method": "no_post_processing"}, "accepted: a list of tokens"),
        ({"classifier_from_token": ["a", "no such"], "method": "no_post_processing"}, "spelled as in its vocabulary"),
        ({"classifier_from_token": [3], "method": "no_post_processing"}, "spelled as in its vocabulary"),
        ({"is_original_qwen3_reranker": True}, "classifier_from_token is None; accepted: two tokens"),
    ],
)
def test_keys_that_name_no_tokens_are_refused(tmp_path: Path, keys: Mapping[str, object], said: str) -> None:
    make_checkpoint(tmp_path)
    add_keys(tmp_path / "config.json", keys)
    with pytest.raises(CheckpointError, match=said):
        read_config(tmp_path)


def test_modules_in_another_order_or_elsewhere_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    by_pair(tmp_path / "model")
    file = tmp_path / "model" / "modules.json"
    transformer, score = json.loads(file.read_text())
    for modules, said in (
        ([score, transformer], "accepted: Transformer, then LogitScore"),
        ([transformer, {**score, "path": "../1_LogitScore"}], "accepted: a folder of this directory"),
    ):
        write_json(file, modules)
        with pytest.raises(CheckpointError, match=said):
            read_config(tmp_path / "model")


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_a_cross_encoder_saves_its_activation_beside_its_config(tmp_path: Path, activation: str) -> None:
    make_bert_checkpoint(tmp_path, head="classes", num_labels=1)
    name = IDENTITY if activation == "none" else "torch.nn.modules.activation.Sigmoid"
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder", "activation_fn": name})
    classifier = read_config(tmp_path).classifier
    assert classifier is not None
    assert classifier.pair_activation == activation


def test_doctor_and_run_name_a_template_that_is_missing(tmp_path: Path) -> None:
    path = make(tmp_path / "model", CASES["module"])
    given = {"model.path": str(path), "engine.device": "cpu"}
    settings = load_settings(given, environ={}, dotenv_path=Path(os.devnull))
    (finding,) = (each for each in model_findings(settings) if each.check == "endpoints")
    assert finding.detail == "the logits of its tokens, which score pairs: /v1/score, /v1/rerank, /classify only"
    (path / "chat_template.jinja").write_text("{{ messages[0].role }}")
    said = "its chat template, which does not show the query and the document; accepted: a chat_template.jinja"
    (finding,) = model_findings(settings)
    assert said in finding.detail
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"query": QUERY, "documents": DOCUMENTS}) + "\n")
    done = CliRunner().invoke(run, ["-i", str(requests), "-o", str(tmp_path / "results"), "--model", str(path)])
    assert isinstance(done.exception, SystemExit)
    assert said in done.output
