"""An encoder's embeddings against transformers in float32."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from engine.checkpoint.embedding_config import Pooling
from engine.encoder import EncoderEngine
from engine.errors import CapabilityError, CheckpointError, EngineError, EngineFatal, InvalidRequest, PromptTooLong
from engine.execution.forward import EncoderExecutor
from engine.loading.load import load_engine
from engine.request import EmbeddingRequest
from settings import load_settings
from tests.support.engines import greedy_request, outputs_of
from tests.support.tiny_checkpoint import ReferenceEmbedder, make_bert_checkpoint, write_pooling

TOLERANCE = 1e-4  # wanted; observed: below 1e-6
TEXTS = ["a", "The millrace carries water.", "short one", "to the mill, 24 hours a day!" * 3, "a", "under the mill"]
VARIANTS: dict[str, tuple[Pooling | None, dict[str, Any]]] = {
    "nothing said": (None, {}),
    "mean": ("mean", {"head": "tokens"}),
    "cls": ("cls", {"hidden_act": "gelu_new", "num_attention_heads": 3}),
    "last token": ("last_token", {"hidden_act": "relu", "type_vocab_size": 1}),
    "nomic_bert": ("mean", {"family": "nomic_bert"}),
    "nomic_bert, another rope": (
        "last_token",
        {
            "family": "nomic_bert",
            "head": "tokens",
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
        },
    ),
    "modernbert": ("mean", {"family": "modernbert"}),
    "modernbert, all biases": (
        "cls",
        {
            "family": "modernbert",
            "head": "tokens",
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "local_attention": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
            "hidden_activation": "relu",
        },
    ),
}


def load(path: Path, **overrides: str) -> EncoderEngine:
    values = {f"engine.{key.replace('__', '.')}": value for key, value in overrides.items()}
    given = {"model.path": str(path), "engine.device": "cpu", "engine.num_threads": "1"} | values
    engine = load_engine(load_settings(given, environ={}, dotenv_path=Path(os.devnull)))
    assert isinstance(engine, EncoderEngine)
    return engine


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert_checkpoint(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("max_num_batched_tokens", ["2048", "64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_embeddings_are_transformers(tmp_path: Path, variant: str, max_num_batched_tokens: str) -> None:
    pooling, options = VARIANTS[variant]
    make_bert_checkpoint(tmp_path, **options)
    if pooling is not None:
        write_pooling(tmp_path, pooling)
    engine = load(tmp_path, max_num_batched_tokens=max_num_batched_tokens)
    inputs = engine.tokenizer.encode_batch(TEXTS)
    reference = ReferenceEmbedder(tmp_path, pooling or "mean")
    alone = [outputs_of(engine, EmbeddingRequest("one", [token_ids]))["one"].embeddings[0] for token_ids in inputs]
    together = outputs_of(engine, EmbeddingRequest("all", inputs))["all"].embeddings
    for token_ids, one, among in zip(inputs, alone, together, strict=True):
        for found in (one, among):
            torch.testing.assert_close(torch.tensor(list(found)), reference.embed(token_ids), atol=TOLERANCE, rtol=0)


def test_layers_that_see_nearby_tokens_are_transformers_in_long_inputs(tmp_path: Path) -> None:
    make_bert_checkpoint(tmp_path, family="modernbert", local_attention=64, max_position_embeddings=1024)
    rng = random.Random(1)
    inputs = [rng.choices(range(5, 80), k=length) for length in (33, 34, 600, 257, 512, 1024, 600)]
    found = outputs_of(load(tmp_path), EmbeddingRequest("all", inputs))["all"].embeddings
    reference = ReferenceEmbedder(tmp_path, "mean")
    for token_ids, vector in zip(inputs, found, strict=True):
        torch.testing.assert_close(torch.tensor(list(vector)), reference.embed(token_ids), atol=TOLERANCE, rtol=0)


def test_keys_of_older_files_name_layers_and_ropes(tmp_path: Path) -> None:
    make_bert_checkpoint(tmp_path, family="modernbert", num_hidden_layers=4)
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    for key in ("layer_types", "rope_parameters"):
        del data[key]
    given = {"global_attn_every_n_layers": 2, "global_rope_theta": 300.0, "local_rope_theta": 30.0}
    file.write_text(json.dumps(data | given))
    engine = load(tmp_path)
    inputs = engine.tokenizer.encode_batch(TEXTS)
    reference = ReferenceEmbedder(tmp_path, "mean")
    found = outputs_of(engine, EmbeddingRequest("all", inputs))["all"].embeddings
    for token_ids, vector in zip(inputs, found, strict=True):
        torch.testing.assert_close(torch.tensor(list(vector)), reference.embed(token_ids), atol=TOLERANCE, rtol=0)


def test_nomics_own_files_are_those_of_transformers(tmp_path: Path) -> None:
    """Its keys are GPT-2's, and name code that is not run; transformers reads none of them."""
    make_bert_checkpoint(tmp_path, family="nomic_bert")
    engine = load(tmp_path)
    inputs = engine.tokenizer.encode_batch(TEXTS)
    expected = outputs_of(engine, EmbeddingRequest("all", inputs))["all"].embeddings
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    keys = ("architectures", "model_type", "vocab_size", "type_vocab_size", "dtype")
    older = {
        "n_embd": data["hidden_size"],
        "n_layer": data["num_hidden_layers"],
        "n_head": data["num_attention_heads"],
        "n_inner": data["intermediate_size"],
        "n_positions": data["max_position_embeddings"],
        "layer_norm_epsilon": data["layer_norm_eps"],
        "activation_function": "swiglu",
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "prenorm": False,
    }
    file.write_text(json.dumps({key: data[key] for key in keys} | older))
    again = load(tmp_path)
    assert again.max_model_len == 128
    assert outputs_of(again, EmbeddingRequest("all", inputs))["all"].embeddings == expected


def test_after_a_step_that_failed_nothing_runs_any_more(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(bert)
    engine.add_request(EmbeddingRequest("a", [[1, 2, 3]]))

    def fail(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(EncoderExecutor, "execute", fail)
    for _ in range(2):
        with pytest.raises(EngineFatal, match="a step ran out of memory"):
            engine.step()
    assert engine.has_unfinished()
    with pytest.raises(EngineFatal, match="a step ran out of memory"):
        engine.add_request(EmbeddingRequest("b", [[1, 2, 3]]))


def test_texts_become_the_ids_of_transformers_uncut_and_unpadded(bert: Path) -> None:
    expected = AutoTokenizer.from_pretrained(bert)(TEXTS, truncation=False, padding=False)["input_ids"]
    assert load(bert).tokenizer.encode_batch(TEXTS) == expected


def test_a_step_takes_whole_inputs_up_to_its_budget(bert: Path) -> None:
    engine = load(bert, max_num_batched_tokens="64")
    engine.add_request(EmbeddingRequest("many", [[2, 3]] * 40))  # 80 tokens
    assert engine.step() == []
    assert (engine.step_size, engine.stats().num_waiting) == ((32, 64), 8)
    assert len(engine.step()[0].embeddings) == 40
    assert (engine.step_size, engine.stats().num_waiting, engine.stats().prompt_tokens) == ((8, 16), 0, 80)
    assert engine.step() == []
    assert (engine.step_size, engine.stats().num_steps) == ((0, 0), 2)
    longer = outputs_of(engine, EmbeddingRequest("longer than a step's budget", [[5] * 100]))
    assert [output.error for output in longer.values()] == [None]


def test_the_longest_input_is_the_models_and_one_token_more_is_refused(bert: Path) -> None:
    engine = load(bert)
    assert engine.max_model_len == 128
    assert outputs_of(engine, EmbeddingRequest("fits", [[5] * 128]))["fits"].error is None
    with pytest.raises(PromptTooLong) as caught:
        engine.add_request(EmbeddingRequest("long", [[5], [5] * 129]))
    assert (caught.value.need, caught.value.capacity, caught.value.param) == (129, 128, "input[1]")


def test_sentence_transformers_length_is_a_default_that_a_setting_raises(tmp_path: Path) -> None:
    make_bert_checkpoint(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    assert load(tmp_path).max_model_len == 32
    assert load(tmp_path, max_model_len="100").max_model_len == 100
    with pytest.raises(CapabilityError, match="made for 128 tokens"):
        load(tmp_path, max_model_len="129")


def test_a_prompt_to_continue_is_refused(bert: Path) -> None:
    with pytest.raises(InvalidRequest, match="it generates nothing") as caught:
        load(bert).add_request(greedy_request("g", [5]))
    assert caught.value.code == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("key", "value"),
    [("deterministic", "true"), ("quantization", "int8"), ("async_scheduling", "true"), ("kv_cache__dtype", "fp8")],
)
def test_what_an_encoder_cannot_do_is_refused_by_name(bert: Path, key: str, value: str) -> None:
    with pytest.raises(CapabilityError, match=f"engine.{key.replace('__', '.')}=.*not available for an encoder"):
        load(bert, **{key: value})


def test_names_of_tensorflow_and_an_old_buffer_are_understood(tmp_path: Path) -> None:
    make_bert_checkpoint(tmp_path)
    expected = outputs_of(load(tmp_path), EmbeddingRequest("e", [[2, 9, 3]]))["e"].embeddings
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    renamed["embeddings.position_ids"] = torch.arange(128)[None]
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert outputs_of(load(tmp_path), EmbeddingRequest("e", [[2, 9, 3]]))["e"].embeddings == expected


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_an_old_buffer_may_be_in_an_index_too(tmp_path: Path, prefix: str) -> None:
    make_bert_checkpoint(tmp_path, head="tokens" if prefix else "none")
    expected = outputs_of(load(tmp_path), EmbeddingRequest("e", [[2, 9, 3]]))["e"].embeddings
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = {"a.safetensors": tensors, "b.safetensors": {f"{prefix}embeddings.position_ids": torch.arange(128)[None]}}
    for file_name, held in shards.items():
        save_file(held, tmp_path / file_name, metadata={"format": "pt"})
    weight_map = {name: file_name for file_name, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert outputs_of(load(tmp_path), EmbeddingRequest("e", [[2, 9, 3]]))["e"].embeddings == expected


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    make_bert_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"dense.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place for tensor dense\.weight"):
        load(tmp_path)


def test_the_more_urgent_goes_first_and_an_aborted_one_has_no_vectors(bert: Path) -> None:
    engine = load(bert, max_num_batched_tokens="64")
    engine.add_request(EmbeddingRequest("later", [[5] * 60], priority=5))
    engine.add_request(EmbeddingRequest("gone", [[6] * 60], priority=5))
    engine.add_request(EmbeddingRequest("first", [[7] * 60], priority=0))
    assert engine.abort("gone")
    assert not engine.abort("gone")
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["gone", "first"]
    assert outputs[0].was_aborted
    assert not outputs[1].was_aborted
    assert [output.request_id for output in engine.step()] == ["later"]


def test_closing_ends_what_waits(bert: Path) -> None:
    engine = load(bert)
    engine.add_request(EmbeddingRequest("e", [[5]]))
    engine.close()
    assert [output.was_aborted for output in engine.step()] == [True]
    assert not engine.has_unfinished()


def test_values_that_are_not_finite_fail_the_request_alone(tmp_path: Path) -> None:
    file = make_bert_checkpoint(tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["embeddings.word_embeddings.weight"][9] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    engine = load(tmp_path)
    outputs = outputs_of(engine, EmbeddingRequest("bad", [[5], [9], [6]]), EmbeddingRequest("good", [[5]]))
    assert isinstance(outputs["bad"].error, EngineError)
    assert outputs["good"].error is None
    assert not engine.has_unfinished()
