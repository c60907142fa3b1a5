"""Measures what int8 weights cost: how far the model's logits are from those of its full weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.model_config import read_config
from engine.checkpoint.weights import Checkpoint
from engine.errors import CapabilityError
from engine.execution.batch import ForwardItem, plan_batch
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from engine.loading.derived_settings import derive_for, model_path
from engine.loading.kv_pool import kv_cache_spec, longest_row
from engine.models.decoder import DecoderModel
from engine.models.load import load_decoder, stream_decoder
from engine.models.placement import prepare_placement
from engine.staging import ArrayStaging
from kernels.dispatch import operations
from settings import EffectiveSettings

NUM_SEQUENCES = 32
SEQUENCE_TOKENS = 8


@dataclass(frozen=True)
class QuantizationError:
    """Differences of logits, in standard deviations of the row of the full weights' logits that they are in."""

    max_error: float
    mean_error: float
    same_greedy_tokens: float  # share of rows whose largest logit is the same token's


def measure_quantization_error(effective: EffectiveSettings) -> QuantizationError:
    """Load the quantised model, and its full weights layer by layer, and compare their logits.

    On 32 sequences of 8 token ids, drawn uniformly with a fixed seed: the same in every run for one vocabulary size.
    On natural text a model is surer of its next token. Raises CheckpointError, SettingsError, CapabilityError (no
    such kernels here, no logits, too little memory).
    """
    path = model_path(effective)
    config = read_config(path)
    effective = derive_for(effective, path, config)
    if isinstance(config, EncoderConfig):
        raise CapabilityError("an encoder makes no logits to compare")
    spec = kv_cache_spec(effective, config)
    placement = prepare_placement(effective.settings.engine, max_positions=longest_row(effective, config))
    with Checkpoint.open(path) as checkpoint:
        actual = _logits(load_decoder(config, checkpoint, placement), spec)
        full = stream_decoder(config, checkpoint, replace(placement, ops=operations(placement.device), rounded_to=None))
        expected = _logits(full, spec)
    error = (actual - expected).abs() / expected.std(dim=1, keepdim=True)
    same = (actual.argmax(1) == expected.argmax(1)).float().mean()
    return QuantizationError(float(error.max()), float(error.mean()), float(same))


def _logits(model: DecoderModel, spec: KVCacheSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SEQUENCES, SEQUENCE_TOKENS)
    token_ids = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    blocks_each = -(-SEQUENCE_TOKENS // spec.block_size)
    items = []
    for index, row in enumerate(token_ids):
        first = 1 + index * blocks_each  # block 0 is the null block
        items.append(ForwardItem(row, 0, range(first, first + blocks_each), wants_logits=True))
    kv_cache = KVCacheTensors.allocate(spec, 1 + NUM_SEQUENCES * blocks_each, model.device)
    planned = plan_batch(items, spec.block_size)
    return model.forward(planned.on_device(ArrayStaging(model.device).send(planned.arrays)), kv_cache).logits.float()
