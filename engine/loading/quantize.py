"""Writes a checkpoint with its linear layers rounded to 4 or 8 bits, in compressed-tensors' format.

Rounded to the nearest, or to 4 bits by prompts. vLLM and transformers load these files as any others of that format.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from engine.checkpoint.config_reader import MAX_CONFIG_BYTES, read_json_object
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.files import CONFIG_FILE, INDEX_FILE, OTHER_FORMATS, WeightFiles
from engine.checkpoint.model_config import read_config
from engine.checkpoint.weights import Checkpoint
from engine.errors import CheckpointError
from engine.loading.calibration import calibrated, read_prompts
from engine.models.load import check_decoder
from engine.text.tokenizer import Tokenizer
from kernels.quantised import QuantisedWeight, WeightScheme, quantise

DEFAULT_GROUP_SIZE = 128
# Heads and routers are left as they are: their rounding would cost more than their bytes.
IGNORED = ("lm_head", "re:.*(mlp|block_sparse_moe)\\.(shared_expert_)?gate$")
_WEIGHTS = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
_INPUTS = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token", "group_size": None}
FORMATS: Mapping[str, str] = MappingProxyType(
    {"w4a16": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized"}
)


def scheme_named(name: str, group_size: int = DEFAULT_GROUP_SIZE) -> WeightScheme:
    """w4a16: integers of 4 bits in groups; w8a8: 8 bits a channel, activations too; fp8: likewise in e4m3."""
    if name == "w4a16":
        return WeightScheme(4, is_float=False, group_size=group_size)
    is_float = name == "fp8"
    return WeightScheme(8, is_float, group_size=None, activations="float8_token" if is_float else "int8_token")


def quantise_checkpoint(
    source: Path, target: Path, name: str, group_size: int = DEFAULT_GROUP_SIZE, prompts: Path | None = None
) -> int:
    """Write the checkpoint of directory `source` into `target`, which must not exist; answers the bytes of its weights.

    name: of FORMATS. prompts: a text file, a prompt a line, beside w4a16 alone: see `engine.loading.calibration`. A
    file at a time is in memory, with prompts all that is written. Raises CheckpointError: no decoder, one that is
    quantised already, tensors that are missing or extra, inputs that no number of groups covers, a target that is
    there, no prompts.
    """
    config = read_config(source)
    if isinstance(config, EncoderConfig):
        raise CheckpointError(f"{source}: an encoder; accepted: a decoder")
    if config.quantization is not None:
        raise CheckpointError(f"{source}: quantised already ({config.quantization}); accepted: the full weights")
    if config.moe is not None and (config.moe.names.is_fused or config.moe.names.is_biased):
        raise CheckpointError(f"{source}: a layer's experts are one tensor; accepted: a tensor for each expert")
    if target.exists():
        raise CheckpointError(f"{target}: is there already; accepted: a directory that is not")
    files, scheme = WeightFiles.find(source), scheme_named(name, group_size)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        with Checkpoint.open(source) as checkpoint:
            check_decoder(config, checkpoint)
            _check_widths(checkpoint, scheme)
            rounded: dict[str, QuantisedWeight] = {}
            if prompts is not None:
                token_ids = read_prompts(prompts, Tokenizer.from_directory(source), config.max_position_embeddings)
                rounded = dict(calibrated(config, checkpoint, token_ids, scheme))
            # Nor weights that are not read, such as the 16 GB under original/ in Llama's repositories.
            weights = [f"*{suffix}" for suffix in (".safetensors", *OTHER_FORMATS)]
            shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*weights, INDEX_FILE))
            num_bytes = _write_weights(checkpoint, files, partial, scheme, rounded)
        data = read_json_object(source / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)
        ignored = IGNORED if config.classifier is None else ("score", *IGNORED)
        data["quantization_config"] = _description(name, scheme, ignored)
        (partial / CONFIG_FILE).write_text(json.dumps(data, indent=2) + "\n")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return num_bytes


def _is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a layer that is quantised: those of attention and of MLPs."""
    return name.endswith("_proj.weight") or ".experts." in name


def _check_widths(checkpoint: Checkpoint, scheme: WeightScheme) -> None:
    if scheme.group_size is None:
        return
    for name in sorted(filter(_is_linear, checkpoint.names())):
        width = checkpoint.shape(name)[1]
        if width % scheme.group_size:
            raise CheckpointError(
                f"tensor {name} has {width} inputs; accepted: a multiple of the group size ({scheme.group_size})"
            )


def _write_weights(
    checkpoint: Checkpoint,
    files: WeightFiles,
    target: Path,
    scheme: WeightScheme,
    rounded: Mapping[str, QuantisedWeight],
) -> int:
    """Each file under its name, and the index if there was one; answers the bytes of all tensors.

    rounded: by the tensor's name, what is rounded already.
    """
    index: dict[str, str] = {}
    num_bytes = 0
    for file in files.file_names:
        tensors: dict[str, torch.Tensor] = {}
        held = checkpoint.names() if files.index is None else {n for n, place in files.index.items() if place == file}
        for name in sorted(held):
            weight = checkpoint.read(name)
            if _is_linear(name):
                stored = rounded[name] if name in rounded else quantise(weight, scheme, weight.dtype)
                tensors |= _stored(name.removesuffix(".weight"), stored)
            else:
                tensors[name] = weight.contiguous()
        save_file(tensors, target / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if files.index is not None:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(index.items()))}
        (target / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")
    return num_bytes


def _stored(module: str, weight: QuantisedWeight) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by compressed-tensors' names."""
    scales = {f"{module}.weight_scale": weight.scales}
    if weight.scheme.bits == 8:
        return {f"{module}.weight": weight.values, **scales}
    return {
        f"{module}.weight_packed": weight.values.view(torch.int32),
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        **scales,
    }


def _description(name: str, scheme: WeightScheme, ignored: Sequence[str]) -> dict[str, object]:
    """What config.json says of it. ignored: the linear layers that are left as they are."""
    number = "float" if scheme.is_float else "int"
    weights = _WEIGHTS | {
        "num_bits": scheme.bits,
        "type": number,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
    }
    inputs = None if scheme.activations == "none" else _INPUTS | {"type": number}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[name],
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
