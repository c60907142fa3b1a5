"""Checks whether the model can be loaded here, without loading it, how much fits beside it, and what int8 costs it.

Imported only where torch is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from engine.checkpoint.classifier_config import ClassifierConfig
from engine.checkpoint.embedding_config import read_pooling
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.model_config import ModelConfig, read_config, read_eos_token_ids
from engine.checkpoint.weights import Checkpoint, is_body_alone
from engine.errors import CapabilityError, CheckpointError, EngineError
from engine.loading.derived_settings import derive_for, model_path
from engine.loading.kv_pool import device_memory, expected_profile, expected_weights_bytes, kv_cache_spec
from engine.loading.quantization_error import measure_quantization_error
from engine.models.load import check_decoder
from engine.models.load_encoder import check_encoder
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings, EngineSettings, SettingsError, Source
from worker.doctor.machine import device_findings, machine_findings, size_text, wanted_device
from worker.doctor.report import Finding, Level
from worker.requests.pair_prompts import PairPrompts
from worker.requests.step_engine import served_endpoints


def engine_findings(effective: EffectiveSettings) -> Iterator[Finding]:
    """Everything that a worker needs beside Redis."""
    settings = effective.settings.engine
    device = wanted_device(settings)
    yield from device_findings(settings, device)
    yield from machine_findings(settings, device)
    yield from model_findings(effective)


def model_findings(effective: EffectiveSettings) -> Iterator[Finding]:
    """Files, tensors, tokenizer, template, memory. No weight is read."""
    if effective.settings.model.path is None:
        fix = "set model.path (MILLRACE_MODEL__PATH, --model DIR) where a worker is to run"
        yield Finding("model", Level.WARNING, "model.path is not set", fix)
        return
    try:
        path = model_path(effective)
        config = read_config(path)
        with Checkpoint.open(path) as checkpoint:
            yield from list(_of_checkpoint(effective, path, config, checkpoint))
    except (CheckpointError, SettingsError) as error:
        yield Finding("model", Level.FAILED, str(error), "give the directory of a supported checkpoint, whole")


def _of_checkpoint(
    effective: EffectiveSettings, path: Path, config: ModelConfig | EncoderConfig, checkpoint: Checkpoint
) -> Iterator[Finding]:
    if isinstance(config, EncoderConfig):
        check_encoder(config, checkpoint)
        tokenizer = Tokenizer.for_encoding(path)
    else:
        check_decoder(config, checkpoint)
        read_eos_token_ids(path, config.vocab_size)
        tokenizer = Tokenizer.from_directory(path)
    read_pooling(path, config)
    num_tensors, size = len(checkpoint.names()), size_text(checkpoint.total_bytes)
    detail = f"{path}: {config.architecture}, {num_tensors} tensors, {size} in {_stored_dtype(config)}"
    yield Finding("model", Level.OK, detail)
    yield _tokenizer(tokenizer, config.vocab_size)
    try:
        derived = derive_for(effective, path, config)
    except CapabilityError as error:
        yield Finding("fit", Level.FAILED, str(error), "set what the line names; or a smaller model, or more memory")
        return
    if not isinstance(config, EncoderConfig):
        yield _fit(derived, config, checkpoint)
    is_decoder = not isinstance(config, EncoderConfig) and not is_body_alone(checkpoint.names())
    if is_decoder and config.classifier is None:
        yield _chat_template(tokenizer)
    else:
        yield _endpoints(config.classifier, tokenizer)


def _endpoints(classifier: ClassifierConfig | None, tokenizer: Tokenizer) -> Finding:
    """What a model that generates nothing serves. Raises CheckpointError without the template that its pairs need."""
    if classifier is not None:
        PairPrompts(classifier.pair_form, tokenizer)
    if classifier is None:
        kind = "no head"
    elif classifier.token_logits and classifier.scores_pairs:
        kind = "the logits of its tokens, which score pairs"
    elif classifier.scores_pairs:
        kind = "a head of one class, which scores pairs"
    else:
        kind = f"a head of {len(classifier.labels)} classes"
    served = ", ".join(served_endpoints(generates=False, compares=True, classifier=classifier))
    return Finding("endpoints", Level.OK, f"{kind}: {served} only")


def _tokenizer(tokenizer: Tokenizer, vocab_size: int) -> Finding:
    detail = f"{tokenizer.vocab_size} tokens, the model has {vocab_size}"
    if tokenizer.vocab_size > vocab_size:
        fix = "take tokenizer.json and the weights from one checkpoint"
        return Finding("tokenizer", Level.WARNING, f"{detail}: prompts with the tokens beyond are refused", fix)
    return Finding("tokenizer", Level.OK, detail)


def fit_finding(derived: EffectiveSettings) -> Finding | None:
    """What the weights take, by scheme, and the tokens whose KV fits beside them, under fully derived settings.

    None for an encoder, which has no KV cache. Raises CheckpointError.
    """
    path = model_path(derived)
    config = read_config(path)
    if isinstance(config, EncoderConfig):
        return None
    with Checkpoint.open(path) as checkpoint:
        return _fit(derived, config, checkpoint)


def _fit(derived: EffectiveSettings, config: ModelConfig, checkpoint: Checkpoint) -> Finding:
    engine, spec = derived.settings.engine, kv_cache_spec(derived, config)
    weights_bytes = expected_weights_bytes(checkpoint, config, engine)
    num_blocks, longest = engine.kv_cache.num_blocks or 0, engine.max_model_len or 1
    num_tokens = (num_blocks - 1) * engine.kv_cache.block_size
    weights = f"weights take {size_text(weights_bytes)} in {_weights_dtype(engine, config)}"
    detail = (
        f"{weights}; the KV cache of {size_text(num_blocks * spec.bytes_per_block)} holds {num_tokens} tokens "
        f"({num_blocks} blocks): "
        f"{num_tokens // longest} sequences of engine.max_model_len={longest}"
    )
    if derived.source_of("engine.kv_cache.num_blocks") is not Source.ESTIMATED:
        return Finding("fit", Level.OK, detail)
    memory = device_memory(torch.device(engine.device))
    if memory is not None:
        left_bytes = expected_profile(engine, config, weights_bytes, memory).kv_bytes
        if left_bytes < 2 * spec.bytes_per_block:
            fix = "raise engine.gpu_memory_utilization, end what else holds the GPU's memory, or take a smaller model"
            detail = f"{weights}; they and the largest step leave {size_text(max(left_bytes, 0))} for the KV cache"
            return Finding("fit", Level.FAILED, detail, fix)
    leaves = f"engine.gpu_memory_utilization={engine.gpu_memory_utilization} leaves"
    return Finding("fit", Level.OK, f"{detail}, estimated: a worker measures what {leaves}")


def _stored_dtype(config: ModelConfig | EncoderConfig) -> str:
    if isinstance(config, EncoderConfig) or config.quantization is None:
        return config.dtype
    return f"{config.quantization}, the rest {config.dtype}"


def _weights_dtype(engine: EngineSettings, config: ModelConfig) -> str:
    if config.quantization is not None:
        return f"{config.quantization}, the rest {engine.dtype}"
    return engine.dtype if engine.quantization == "none" else engine.quantization


def _chat_template(tokenizer: Tokenizer) -> Finding:
    if tokenizer.chat_template is None:
        fix = "add chat_template.jinja to the checkpoint, or send prompts only"
        return Finding("chat template", Level.WARNING, "none: lines with messages will be refused", fix)
    return Finding("chat template", Level.OK, "found")


def quantization_findings(effective: EffectiveSettings) -> Iterator[Finding]:
    """How far the quantised model's logits are from those of its full weights; loads the model, which takes a while."""
    quantization = effective.settings.engine.quantization
    if quantization == "none":
        detail, fix = "engine.quantization=none: there is nothing to compare", "set engine.quantization=int8 or int4"
        yield Finding("quantization", Level.WARNING, detail, fix)
        return
    try:
        error = measure_quantization_error(effective)
    except (EngineError, SettingsError) as failure:
        fix = "set what the line names, or engine.quantization=none"
        yield Finding("quantization", Level.FAILED, f"not measured: {failure}", fix)
        return
    yield Finding(
        "quantization",
        Level.OK,
        f"{quantization}: logits are off by {error.mean_error:.3f} on average and {error.max_error:.3f} at most, in "
        f"standard deviations of their row; the likeliest token is the same in {error.same_greedy_tokens:.1%} of rows",
    )
