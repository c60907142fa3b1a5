"""What quantised weights cost in accuracy, measured on the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.execution.batch_staging import BatchStaging
from engine.execution.forward_item import ForwardItem
from engine.execution.plan_batch import plan_batch
from engine.kv_cache.kv_cache_spec import KVCacheSpec
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.models.decoder_model import DecoderModel
from engine.models.load_decoder import stream_decoder
from engine.models.model_placement import ModelPlacement
from kernels.dispatch import operations

NUM_SEQUENCES = 32
SEQUENCE_TOKENS = 8


@dataclass(frozen=True)
class QuantizationError:
    """Differences of logits, in units of the standard deviation of the unquantised row they are in."""

    max_error: float
    mean_error: float
    same_greedy_tokens: float  # share of rows whose largest logit is the same token's


def measure_quantization_error(
    model: DecoderModel, config: ModelConfig, checkpoint: Checkpoint, placement: ModelPlacement, spec: KVCacheSpec
) -> QuantizationError:
    """Compare the model with its unquantised weights, of which one layer at a time is in memory.

    On 32 sequences of 8 token ids, drawn uniformly with a fixed seed: the same for every run of a vocabulary's size,
    and no natural text, on which a model is surer of its next token.
    """
    plain = stream_decoder(config, checkpoint, replace(placement, ops=operations(placement.device)))
    expected, actual = _logits(plain, spec), _logits(model, spec)
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
    batch = BatchStaging(model.device).stage(plan_batch(items, spec.block_size))
    return model.forward(batch, kv_cache).logits
