"""How much memory a checkpoint's weights will take, before they are loaded."""

from __future__ import annotations

from engine.checkpoint.body_alone import is_body_alone
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.loading.dtypes import DTYPES
from settings import EngineSettings


def expected_weights_bytes(checkpoint: Checkpoint, config: ModelConfig, settings: EngineSettings) -> int:
    """Bytes under fully derived device, dtype and quantization, within a hundredth.

    A tied head is counted as a second copy of the embedding on every CPU; those without a layout of their own (not x86,
    or no AVX) share it, and get fewer KV blocks than they could have. Norms and routers, which stay
    in the model dtype, and the scales of quantised weights are left out of the account: together below a hundredth.
    """
    itemsize = DTYPES[settings.dtype].itemsize
    num_elements = checkpoint.total_bytes // DTYPES[config.dtype].itemsize
    embedding = config.vocab_size * config.hidden_size
    is_packed = settings.device == "cpu" and not settings.deterministic
    if config.tie_word_embeddings and is_packed and not is_body_alone(checkpoint.names()):
        num_elements += embedding
    if settings.quantization == "int8":
        return embedding * itemsize + (num_elements - embedding)
    return num_elements * itemsize
