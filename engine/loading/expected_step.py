"""What a step takes beside weights and KV, before the model is loaded."""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from engine.loading.dtypes import DTYPES
from engine.prompt_scorer import MAX_LOGITS_BYTES
from settings import EngineSettings

# float32 copies of the logits of all rows: themselves, their log-probabilities, the rows that are drawn, those of them
# that are truncated.
LOGITS_COPIES = 4
MASK_BYTES = 2  # of a token of the vocabulary and a row held to a grammar: one in each of two buffers


def expected_step_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    """Bytes that the largest step takes under a fully derived dtype: an estimate, which loading the model measures.

    The largest of a layer over all tokens, of scoring a slice of a prompt (float32 logits and their log-softmax) and of
    sampling over all sequences; they follow each other.
    """
    itemsize = DTYPES[settings.dtype].itemsize
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    feed_forward = 3 * config.intermediate_size
    if config.moe is not None:
        feed_forward = config.moe.experts_per_token * (3 * config.moe.intermediate_size + config.hidden_size)
    layer = settings.max_num_batched_tokens * (4 * config.hidden_size + max(attention, feed_forward)) * itemsize
    logits = settings.max_num_seqs * config.vocab_size * (itemsize + 4 * LOGITS_COPIES + MASK_BYTES)
    scored_tokens = min(settings.max_num_batched_tokens, MAX_LOGITS_BYTES // (4 * config.vocab_size))
    return max(layer, logits, scored_tokens * config.vocab_size * 8)
