from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.files import Checkpoint
from engine.loading.kv_pool import expected_weights_bytes
from engine.models.decoder import weights_bytes
from tests.support.decoder_config import decoder_config
from tests.support.engines import load_engine
from tests.support.needs_vnni import needs_vnni
from tests.support.tiny_checkpoint import make_checkpoint

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 2}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"engine.dtype": "bfloat16"},
        {"engine.deterministic": "true"},
        pytest.param(
            {"engine.quantization": "int8"},
            marks=needs_vnni,
        ),
    ],
    ids=["float32", "bfloat16", "deterministic", "int8"],
)
def test_what_is_expected_is_within_a_hundredth_of_what_is_loaded(
    tmp_path: Path, overrides: dict[str, str], tied: bool
) -> None:
    make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied, **SHAPE)
    engine = load_engine(tmp_path, overrides)
    with Checkpoint.open(tmp_path) as checkpoint:
        expected = expected_weights_bytes(checkpoint, decoder_config(tmp_path), engine.settings.engine)
    actual = weights_bytes(engine._executor.model)
    assert abs(actual - expected) < 0.01 * actual
