"""The engine for a checkpoint, whichever kind of model it is."""

from __future__ import annotations

from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.read_config import read_config
from engine.embedding.encoder_engine import EncoderEngine
from engine.engine import Engine
from engine.execution.pass_trace import PassTrace
from engine.loading.derived_settings import derive_for, model_path
from engine.loading.load_decoder_parts import load_decoder_parts
from engine.loading.load_encoder_parts import load_encoder_parts
from settings import EffectiveSettings


def load_engine(effective: EffectiveSettings, pass_trace: PassTrace | None = None) -> Engine | EncoderEngine:
    """Derive what is not set, load the model of model.path, warm it up.

    Forward passes that engine.profile selects go into `pass_trace`. Raises CheckpointError, SettingsError (model.path
    leads out of model.root), CapabilityError (a setting this device, build or kind of model cannot honour),
    NonFiniteLogits.
    """
    path = model_path(effective)
    config = read_config(path)
    effective = derive_for(effective, path, config)
    if isinstance(config, EncoderConfig):
        return EncoderEngine(load_encoder_parts(effective, path, config, pass_trace))
    return Engine(load_decoder_parts(effective, path, config, pass_trace))
