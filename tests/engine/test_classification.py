"""Scores of classes, by encoders and decoders with a classification head, against transformers in float32."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.classifier_config import ClassActivation, ClassifierConfig, PairForm
from engine.checkpoint.config_reader import ConfigReader
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.model_config import read_config
from engine.checkpoint.weights import Checkpoint
from engine.encoder import EncoderEngine
from engine.engine import Engine
from engine.errors import CheckpointError, EngineError, InvalidRequest, NonFiniteLogits, PromptTooLong
from engine.loading.load import load_engine
from engine.models.load import check_decoder
from engine.models.load_encoder import check_encoder
from engine.request import ClassificationRequest, EmbeddingRequest, RequestOutput
from settings import load_settings
from tests.support.engines import greedy_request, outputs_of
from tests.support.tiny_checkpoint import (
    ENCODER_DEFAULTS,
    ReferenceClassifier,
    make_bert_checkpoint,
    make_checkpoint,
    make_classifying_decoder,
)
from tests.support.tiny_families import Family

TOLERANCE = 1e-4  # wanted; observed: below 3e-6
LENGTHS = (1, 2, 5, 16, 33, 60)
PADDING = 1  # the id of the encoders like RoBERTa; a token among others for the rest
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, a score": ("bert", {"num_labels": 1}),
    "bert, classes": ("bert", {"num_labels": 3, "hidden_act": "gelu_new"}),
    "bert, one segment": ("bert", {"type_vocab_size": 1}),
    "roberta, classes": ("roberta", {"num_labels": 4}),
    "xlm-roberta, a score": ("xlm-roberta", {"num_labels": 1, "type_vocab_size": 2}),
    "modernbert, a score": ("modernbert", {"num_labels": 1}),
    "modernbert, classes": (
        "modernbert",
        {
            "num_labels": 3,
            "classifier_pooling": "mean",
            "classifier_bias": True,
            "norm_bias": True,
            "classifier_activation": "silu",
        },
    ),
    "nomic_bert, a score": ("nomic_bert", {"num_labels": 1}),
    "nomic_bert, classes": ("nomic_bert", {"num_labels": 3, "type_vocab_size": 1, "hidden_act": "gelu"}),
    "qwen3, a score": ("qwen3", {"num_labels": 1, "tie_word_embeddings": True}),
    "llama, classes": ("llama", {"num_labels": 5}),
    "qwen2, classes": ("qwen2", {"num_labels": 2}),
    "qwen2_moe, classes": ("qwen2_moe", {"num_labels": 3}),
    "qwen3_moe, a score": ("qwen3_moe", {"num_labels": 1}),
    "mistral, a score": ("mistral", {"num_labels": 1}),
    "mixtral, classes": ("mixtral", {"num_labels": 3}),
    "phi3, a score": ("phi3", {"num_labels": 1}),
    "smollm3, classes": ("smollm3", {"num_labels": 3}),
    "olmo2, a score": ("olmo2", {"num_labels": 1}),
}


def load(path: Path, **overrides: str) -> Engine | EncoderEngine:
    values = {f"engine.{key.replace('__', '.')}": value for key, value in overrides.items()}
    given = {"model.path": str(path), "engine.device": "cpu", "engine.num_threads": "1"} | values
    return load_engine(load_settings(given, environ={}, dotenv_path=Path(os.devnull)))


def make(path: Path, family: str, options: dict[str, Any]) -> Path:
    if family in ENCODER_DEFAULTS:
        return make_bert_checkpoint(path, head="classes", family=family, **options)
    return make_classifying_decoder(path, cast(Family, family), **options)


class Case:
    """A checkpoint, inputs of all lengths, some with a prefix in common, each a pair, and transformers' logits."""

    def __init__(self, path: Path, family: str, options: dict[str, Any]) -> None:
        self.path = make(path, family, options)
        self.is_encoder = family in ENCODER_DEFAULTS
        rng = random.Random(7)
        ids = range(1, 64)
        shared = rng.choices(ids, k=48)
        self.inputs = [rng.choices(ids, k=length) for length in LENGTHS for _ in range(2)]
        self.inputs[::3] = [shared + token_ids for token_ids in self.inputs[::3]]
        self.inputs[-1] += [PADDING, PADDING]
        self.starts = [rng.randint(0, len(token_ids)) for token_ids in self.inputs]
        reference = ReferenceClassifier(path)
        pairs = zip(self.inputs, self.starts, strict=True)
        self.expected = [reference.logits(*pair) for pair in pairs]

    def check(self, engine: Engine | EncoderEngine) -> dict[str, RequestOutput]:
        """Half of the inputs as requests of their own, the others as one request."""
        half = len(self.inputs) // 2
        requests = [self.request(f"c{index}", slice(index, index + 1)) for index in range(half)]
        outputs = outputs_of(engine, *requests, self.request("many", slice(half, None)))
        for index in range(half):
            assert_close(outputs[f"c{index}"], self.expected[index : index + 1])
        assert_close(outputs["many"], self.expected[half:])
        return outputs

    def request(self, name: str, those: slice) -> ClassificationRequest:
        return ClassificationRequest(name, self.inputs[those], "none", self.starts[those])


def assert_close(output: RequestOutput, expected: Sequence[torch.Tensor]) -> None:
    assert output.error is None, output.error
    assert not output.was_aborted
    assert output.embeddings == ()
    for found, wanted in zip(output.class_scores, expected, strict=True):
        torch.testing.assert_close(torch.tensor(list(found)), wanted, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("classifier"), *VARIANTS[request.param])


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert_checkpoint(tmp_path_factory.mktemp("bert"), head="classes", num_labels=3)


def test_logits_are_transformers_alone_and_with_others(case: Case) -> None:
    engine = load(case.path)
    for index in range(len(case.inputs)):
        outputs = outputs_of(engine, case.request("one", slice(index, index + 1)))
        assert_close(outputs["one"], case.expected[index : index + 1])
    case.check(engine)


def test_logits_are_transformers_in_small_steps(case: Case) -> None:
    case.check(load(case.path, max_num_batched_tokens="9", max_num_seqs="5"))


def test_a_decoders_prefixes_are_computed_once(case: Case) -> None:
    if case.is_encoder:
        pytest.skip("an encoder keeps nothing")
    engine = load(case.path)
    case.check(engine)
    before = engine.stats().cached_tokens
    case.check(engine)
    assert engine.stats().cached_tokens - before > 48


def test_a_text_that_ends_with_padding_is_read_up_to_its_last_word(tmp_path: Path) -> None:
    make_classifying_decoder(tmp_path, num_labels=2, pad_token_id=7)
    reference, engine = ReferenceClassifier(tmp_path), load(tmp_path)
    inputs = [[3, 4, 5, 7, 7], [3, 7, 4], [7, 7, 7], [7], [9]]
    output = outputs_of(engine, ClassificationRequest("a", inputs, "none"))["a"]
    assert_close(output, [reference.logits(token_ids) for token_ids in inputs])
    assert output.num_prompt_tokens == sum(map(len, inputs))


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_head_is_computed_in_float32_whatever_the_models_dtype(tmp_path: Path, family: str) -> None:
    engine = load(make(tmp_path, family, {"num_labels": 8}), dtype="bfloat16")
    (scores,) = outputs_of(engine, ClassificationRequest("a", [[3, 4, 5]], "none"))["a"].class_scores
    logits = torch.tensor(list(scores))
    assert int((logits.bfloat16().float() != logits).sum()) >= 6
    torch.testing.assert_close(logits, ReferenceClassifier(tmp_path).logits([3, 4, 5]), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_a_deterministic_engine_gives_the_bits_of_a_text_alone(tmp_path: Path, family: Family) -> None:
    make_classifying_decoder(tmp_path, family, num_labels=3)
    inputs = [[number, *range(20 + number)] for number in range(1, 9)]
    alone = [
        outputs_of(load(tmp_path, deterministic="true"), ClassificationRequest("a", [token_ids], "softmax"))["a"]
        for token_ids in inputs
    ]
    engine = load(tmp_path, deterministic="true", max_num_batched_tokens="50", max_num_seqs="8")
    together = outputs_of(engine, ClassificationRequest("a", inputs, "softmax"))["a"]
    assert [output.class_scores[0] for output in alone] == list(together.class_scores)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("none", lambda logits: logits),
        ("sigmoid", torch.sigmoid),
        ("softmax", lambda logits: torch.softmax(logits, dim=-1)),
    ],
)
def test_what_is_made_of_logits(bert: Path, activation: ClassActivation, expected: Any) -> None:
    logits = ReferenceClassifier(bert).logits([2, 9, 3])
    output = outputs_of(load(bert), ClassificationRequest("a", [[2, 9, 3]], activation))["a"]
    torch.testing.assert_close(torch.tensor(list(output.class_scores[0])), expected(logits), atol=1e-5, rtol=0)


def test_large_logits_neither_overflow_nor_vanish(tmp_path: Path) -> None:
    make_bert_checkpoint(tmp_path, head="classes", num_labels=2)
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | {"classifier.bias": torch.tensor([1e4, -60.0]), "classifier.weight": torch.zeros(2, 48)}
    save_file(weights, file, metadata={"format": "pt"})
    kinds: tuple[ClassActivation, ...] = ("sigmoid", "softmax")
    outputs = outputs_of(load(tmp_path), *(ClassificationRequest(kind, [[2, 3]], kind) for kind in kinds))
    assert outputs["softmax"].class_scores[0].tolist() == [1.0, 0.0]
    assert outputs["sigmoid"].class_scores[0].tolist() == pytest.approx([1.0, 8.7565e-27], rel=1e-4)


def test_equal_requests_are_run_once_and_others_are_not(bert: Path) -> None:
    engine = load(bert)
    same = [ClassificationRequest(name, [[2, 9, 8, 3]], "softmax", [2]) for name in "ab"]
    other_pair = ClassificationRequest("c", [[2, 9, 8, 3]], "softmax", [3])
    other_form = ClassificationRequest("d", [[2, 9, 8, 3]], "none", [2])
    outputs = outputs_of(engine, *same, other_pair, other_form)
    assert engine.stats().num_duplicates == 1
    assert outputs["a"].class_scores == outputs["b"].class_scores
    assert len({tuple(outputs[name].class_scores[0]) for name in "acd"}) == 3


def test_a_model_with_a_head_makes_no_embeddings_and_no_text(bert: Path, tmp_path: Path) -> None:
    for engine in (load(bert), load(make_classifying_decoder(tmp_path))):
        assert not engine.generates
        for request, said in (
            (EmbeddingRequest("a", [[2]]), "has a classification head: it makes no embeddings"),
            (greedy_request("b", [2]), "it generates nothing"),
        ):
            with pytest.raises(InvalidRequest, match=said) as caught:
                engine.add_request(request)
            assert caught.value.code == "unsupported_endpoint"


def test_a_model_without_a_head_scores_no_classes(tmp_path: Path) -> None:
    for engine in (load(make_bert_checkpoint(tmp_path / "b")), load(make_checkpoint(tmp_path / "d"))):
        assert engine.classifier is None
        with pytest.raises(InvalidRequest, match="no classification head") as caught:
            engine.add_request(ClassificationRequest("a", [[2]], "softmax"))
        assert caught.value.code == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (ClassificationRequest("a", [], "none"), InvalidRequest, "input"),
        (ClassificationRequest("a", [[2], []], "none"), InvalidRequest, "input[1]"),
        (ClassificationRequest("a", [[2], [10**6]], "none"), InvalidRequest, "input[1]"),
        (ClassificationRequest("a", [[2] * 129], "none"), PromptTooLong, "input"),
        (ClassificationRequest("a", [[2, 3]], "none", [3]), InvalidRequest, "second_starts"),
        (ClassificationRequest("a", [[2, 3]], "none", [-1]), InvalidRequest, "second_starts"),
        (ClassificationRequest("a", [[2, 3]], "none", [1, 1]), InvalidRequest, "second_starts"),
    ],
)
def test_what_can_never_be_scored_is_refused(
    bert: Path, request_: ClassificationRequest, error: type[EngineError], param: str
) -> None:
    with pytest.raises(error) as caught:
        load(bert).add_request(request_)
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.param == param


def test_encoders_like_roberta_have_positions_behind_their_padding(tmp_path: Path) -> None:
    engine = load(make_bert_checkpoint(tmp_path, family="roberta", head="classes", max_position_embeddings=34))
    assert engine.max_model_len == 32
    assert outputs_of(engine, ClassificationRequest("a", [[5] * 32], "none"))["a"].error is None
    with pytest.raises(PromptTooLong):
        engine.add_request(ClassificationRequest("b", [[5] * 33], "none"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_hidden_states_that_are_not_finite_fail_their_request_alone(tmp_path: Path, family: str, value: float) -> None:
    make(tmp_path, family, {"num_labels": 2})
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "bert.embeddings.word_embeddings.weight" if family == "bert" else "model.embed_tokens.weight"
    weights[name][30] = value
    save_file(weights, file, metadata={"format": "pt"})
    requests = [ClassificationRequest(str(token), [[2, token]], "softmax") for token in (29, 30, 31)]
    outputs = outputs_of(load(tmp_path), *requests)
    assert isinstance(outputs["30"].error, NonFiniteLogits)
    assert [len(outputs[name].class_scores) for name in ("29", "30", "31")] == [1, 0, 1]


def read(**keys: object) -> ClassifierConfig:
    return ClassifierConfig.from_reader(ConfigReader(keys, "config.json"))


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ClassifierConfig(("LABEL_0", "LABEL_1"), "softmax", "sigmoid")),
        ({"num_labels": 1}, ClassifierConfig(("LABEL_0",), "sigmoid", "sigmoid")),
        ({"id2label": {"1": "no", "0": "yes"}}, ClassifierConfig(("yes", "no"), "softmax", "sigmoid")),
        (
            {"problem_type": "multi_label_classification"},
            ClassifierConfig(("LABEL_0", "LABEL_1"), "sigmoid", "sigmoid"),
        ),
        ({"num_labels": 1, "problem_type": "regression"}, ClassifierConfig(("LABEL_0",), "none", "sigmoid")),
        (
            {"num_labels": 1, "problem_type": "single_label_classification", "use_sep_token": True},
            ClassifierConfig(("LABEL_0",), "sigmoid", "sigmoid"),
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"}, "use_pad_token": False},
            ClassifierConfig(("LABEL_0", "LABEL_1"), "softmax", "sigmoid", pair_form=PairForm("joined")),
        ),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0"}},
            ClassifierConfig(("LABEL_0",), "sigmoid", "none"),
        ),
        (
            {"num_labels": 1, "use_sep_token": False},
            ClassifierConfig(("LABEL_0",), "sigmoid", "sigmoid", pair_form=PairForm("joined")),
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": IDENTITY},
            ClassifierConfig(("LABEL_0",), "sigmoid", "none"),
        ),
    ],
)
def test_what_config_json_says_of_a_head(keys: dict[str, object], expected: ClassifierConfig) -> None:
    assert read(**keys) == expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"id2label": {"1": "a"}}, "id2label is"),
        ({"id2label": {}}, "id2label is"),
        ({"id2label": {"0": 1}}, "id2label is"),
        ({"id2label": {"0": "a"}, "num_labels": 2}, "num_labels is 2; accepted: 1"),
        ({"num_labels": 0}, "num_labels is 0"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"},
            "accepted: torch.nn.modules",
        ),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": 3}}, "activation_fn is 3"),
        ({"num_labels": 1, "use_sep_token": "no"}, "use_sep_token is 'no'; accepted: true or false"),
    ],
)
def test_a_head_that_cannot_be_run_is_refused_by_its_key(keys: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(**keys)


@pytest.mark.parametrize("family", ["bert", "roberta", "qwen3"])
def test_a_head_of_another_size_is_refused_without_reading_weights(tmp_path: Path, family: str) -> None:
    make(tmp_path, family, {"num_labels": 3})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": {"0": "a"}}))
    config = read_config(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        check = partial(check_encoder, config) if isinstance(config, EncoderConfig) else partial(check_decoder, config)
        with pytest.raises(CheckpointError, match=r"has shape \[3.*asks for \[1"):
            check(checkpoint)
