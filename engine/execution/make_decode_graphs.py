"""Decode graphs as the settings ask for them."""

from __future__ import annotations

from engine.execution.cuda_graph_backend import CudaGraphBackend
from engine.execution.decode_graph_sizes import decode_graph_sizes
from engine.execution.decode_graphs import DecodeGraphs
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.models.decoder_model import DecoderModel
from settings import EngineSettings


def make_decode_graphs(
    model: DecoderModel, kv_cache: KVCacheTensors, settings: EngineSettings, max_model_len: int
) -> DecodeGraphs | None:
    """Graphs of the sizes that are set, or the usual ones, not captured yet; None where they are off or the model has
    no head and so decodes nothing.
    """
    if not settings.cuda_graphs.enabled or model.lm_head is None:
        return None
    sizes = settings.cuda_graphs.sizes or decode_graph_sizes(settings.max_num_seqs)
    return DecodeGraphs(model, kv_cache, CudaGraphBackend(model.device), sizes, max_model_len)
