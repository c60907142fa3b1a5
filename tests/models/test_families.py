"""Each family does what the table of families says, and what it does not do has the reason given there."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from engine.checkpoint.families import DECODERS, ENCODERS
from engine.encoder import EncoderEngine
from engine.engine import Engine
from engine.errors import CapabilityError, CheckpointError, InvalidRequest
from engine.loading import load
from engine.model_interface import LogitsResult
from engine.request import ClassificationRequest, EmbeddingRequest, Request, RequestOutput
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from settings import load_settings
from tests.models.test_parity import MORE_VARIANTS, VARIANTS
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.family_table import COLUMNS, MODELS, NO_HEAD, NO_KERNELS, gaps, reason, shows
from tests.support.tensors import needs_vnni
from tests.support.tiny_checkpoint import (
    VOCAB_SIZE,
    EncoderName,
    ReferenceClassifier,
    ReferenceEmbedder,
    continue_greedily,
    count_ties_where_it_differs,
    make_bert_checkpoint,
    make_checkpoint,
    make_classifying_decoder,
    write_pooling,
)
from tests.support.tiny_families import Family

TOLERANCE = 1e-4  # of logits and scores in float32
NUM_TOKENS = 12
NUM_LABELS = 3
ROUTERS = ("mlp.gate", "router", "shared_expert_gate")  # how the names of what is never rounded end
Checkpoints = Callable[[str], Path]


def prompts() -> list[list[int]]:
    """One in a block, and two with a block in common that are longer than every window."""
    rng = random.Random(3)
    shared = [rng.randrange(1, 64) for _ in range(20)]
    return [[rng.randrange(1, 64) for _ in range(5)], *([*shared, *rng.choices(range(1, 64), k=n)] for n in (9, 13))]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A decoder's checkpoint of two layers, one of each kind where there are two, made once."""

    @cache
    def make(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), cast(Family, family))

    return make


def load_any(path: Path, **overrides: str) -> Engine | EncoderEngine:
    values = {"model.path": str(path), "engine.device": "cpu", "engine.num_threads": "1", "engine.dtype": "float32"}
    values |= {f"engine.{key}": value for key, value in overrides.items()}
    return load.load_engine(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))


def answer(engine: Engine | EncoderEngine, request: EmbeddingRequest | ClassificationRequest) -> RequestOutput:
    engine.add_request(request)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    (output,) = outputs
    assert output.error is None, output.error
    return output


def logits_of(engine: Engine, prompt: Sequence[int]) -> torch.Tensor:
    result = engine.model_interface.prefill("p", prompt)
    engine.model_interface.release("p")
    assert isinstance(result, LogitsResult)
    return result.logits


def make_plain(path: Path, family: str) -> Path:
    if family in ENCODERS:
        return make_bert_checkpoint(path, family=cast(EncoderName, family))
    return make_checkpoint(path, cast(Family, family))


@shows("loads")
def test_loads_all_that_is_stored(family: str, tmp_path: Path) -> None:
    path = make_plain(tmp_path, family)
    load_any(path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "norm" in name.lower())
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load_any(path)


@shows("generates")
def test_generates_what_transformers_does(family: str, checkpoint_of: Checkpoints) -> None:
    path = checkpoint_of(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    unknown = Tokenizer.from_directory(path).unknown_ids(VOCAB_SIZE)
    expected = continue_greedily(model, prompts(), NUM_TOKENS, suppressed=unknown)
    engine = load_engine(path)
    for prompt, continuation in zip(prompts(), expected, strict=True):
        torch.testing.assert_close(logits_of(engine, prompt), continuation.logits[0], atol=TOLERANCE, rtol=0)
    outputs = run_all(engine, [greedy_request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts())])
    assert sum(count_ties_where_it_differs(e, tokens_of(outputs[str(i)])) for i, e in enumerate(expected)) <= 1


@shows("embeds")
def test_embeds_as_transformers_does(family: str, tmp_path: Path) -> None:
    path = make_plain(tmp_path, family)
    write_pooling(path, "mean")
    engine, reference = load_any(path), ReferenceEmbedder(path, "mean")
    found = answer(engine, EmbeddingRequest("e", prompts())).embeddings
    for vector, prompt in zip(found, prompts(), strict=True):
        torch.testing.assert_close(torch.tensor(list(vector)), reference.embed(prompt), atol=TOLERANCE, rtol=0)


@shows("classifies")
def test_scores_classes_as_transformers_does(family: str, tmp_path: Path) -> None:
    if family in ENCODERS:
        make_bert_checkpoint(tmp_path, head="classes", family=cast(EncoderName, family), num_labels=NUM_LABELS)
    else:
        make_classifying_decoder(tmp_path, cast(Family, family), num_labels=NUM_LABELS)
    reference = ReferenceClassifier(tmp_path)
    found = answer(load_any(tmp_path), ClassificationRequest("c", prompts(), "none")).class_scores
    for scores, prompt in zip(found, prompts(), strict=True):
        torch.testing.assert_close(torch.tensor(list(scores)), reference.logits(prompt), atol=TOLERANCE, rtol=0)


@shows("prefix cache")
def test_prefix_hits_change_nothing(family: str, checkpoint_of: Checkpoints) -> None:
    first, second = prompts()[1:]
    expected = load_engine(checkpoint_of(family), {"engine.prefix_cache.enabled": "false"})
    wanted = tokens_of(run_all(expected, [greedy_request("r", second, NUM_TOKENS)])["r"])
    engine = load_engine(checkpoint_of(family))
    run_all(engine, [greedy_request("first", first, NUM_TOKENS)])
    assert tokens_of(run_all(engine, [greedy_request("r", second, NUM_TOKENS)])["r"]) == wanted
    assert engine.stats().cached_tokens == 16


@shows("deterministic")
def test_deterministic_answers_depend_on_no_other(family: str, checkpoint_of: Checkpoints) -> None:
    """Bit for bit alone, beside others in chunks of few tokens, and after a prefix hit; and the right ones."""

    def asked(index: int, prompt: Sequence[int]) -> Request:
        return Request(str(index), tuple(prompt), SamplingParams(max_tokens=4, temperature=0.0, logprobs=3))

    path, settings = checkpoint_of(family), {"engine.deterministic": "true"}
    requests = [asked(*each) for each in enumerate(prompts())]
    engine = load_engine(path, settings)
    alone = {request.request_id: run_all(engine, [request])[request.request_id].completions for request in requests}
    assert engine.stats().cached_tokens > 0
    chunked = load_engine(path, settings | {"engine.max_num_batched_tokens": "7", "engine.max_num_seqs": "3"})
    together = {name: output.completions for name, output in run_all(chunked, requests).items()}
    assert together == alone
    torch.testing.assert_close(
        logits_of(engine, prompts()[2]), logits_of(load_engine(path), prompts()[2]), atol=TOLERANCE, rtol=0
    )


def rounded(weight: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """With a scale for an output's inputs, which lie along `dim`: for all in 8 bits, for each 128 in 4."""
    groups = torch.split(weight, 128 if bits == 4 else weight.shape[dim], dim)
    scales = [group.abs().amax(dim, keepdim=True) / (2 ** (bits - 1) - 1) for group in groups]
    return torch.cat([(group / scale).round() * scale for group, scale in zip(groups, scales, strict=True)], dim)


def reference_logits(path: Path, bits: int) -> torch.Tensor:
    """[3, V]: transformers' for each prompt, with the weights of every product but the routers' rounded."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            module = name.removesuffix(".weight")
            if weight.dim() < 2 or "bias" in name or "embed_tokens" in name or module.endswith(ROUTERS):
                continue
            is_turned = weight.dim() == 3 and model.config.model_type == "gpt_oss"  # [E, inputs, outputs]
            weight.copy_(rounded(weight, bits, -2 if is_turned else -1))
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts()])


def quantised_logits(path: Path, quantization: str) -> torch.Tensor:
    engine = load_engine(path, {"engine.quantization": quantization})
    return torch.stack([logits_of(engine, prompt) for prompt in prompts()])


@shows("int4")
def test_int4_at_load(family: str, checkpoint_of: Checkpoints) -> None:
    path = checkpoint_of(family)
    torch.testing.assert_close(quantised_logits(path, "int4"), reference_logits(path, 4), atol=TOLERANCE, rtol=0)


@needs_vnni
@shows("int8")
def test_int8_at_load(family: str, checkpoint_of: Checkpoints) -> None:
    """Activations are rounded as well, by a 127th of a row's largest: near, and not equal. Observed: 0.013 to 0.027."""
    path = checkpoint_of(family)
    found, expected = quantised_logits(path, "int8"), reference_logits(path, 8)
    assert 0.002 < float((found - expected).abs().mean() / expected.std()) < 0.06


# What launches no kernel is seen in tests/kernels/aot/test_families.py.
@pytest.mark.parametrize(("column", "family"), [gap for gap in gaps() if COLUMNS[gap[0]].without[gap[1]] != NO_KERNELS])
def test_a_reason_holds(column: str, family: str, tmp_path: Path) -> None:
    if COLUMNS[column].without[family] == NO_HEAD:
        assert family not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        return
    path = make_bert_checkpoint(tmp_path, family=cast(EncoderName, family))
    if column in ("int8", "int4", "deterministic"):
        overrides = {"deterministic": "true"} if column == "deterministic" else {"quantization": column}
        with pytest.raises(CapabilityError, match="not available for an encoder"):
            load_any(path, **overrides)
        return
    engine = load_any(path)
    if column == "prefix cache":
        assert engine.stats().prefix_cache is None
        return
    with pytest.raises(InvalidRequest, match="an encoder: it generates nothing"):
        engine.add_request(greedy_request("r", [5], 1))


def test_no_cell_is_without_a_test_or_a_reason() -> None:
    assert [*MODELS] == [*DECODERS, *ENCODERS]
    for column in COLUMNS:
        for family in MODELS:
            reason(column, family)


def test_the_parity_tests_have_three_variants_of_every_family() -> None:
    assert {family for family, _ in VARIANTS.values()} == DECODERS.keys()
    numbers = Counter(family for family, _ in (VARIANTS | MORE_VARIANTS).values())
    assert min(numbers.values()) >= 3, numbers
