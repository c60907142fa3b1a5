"""Rounds weights to 4 bits so that a layer's outputs on given prompts stay near: GPTQ's update (arXiv 2210.17323).

Inputs of each layer are those of the full weights. Scales are those of rounding to the nearest, so files look alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from engine.checkpoint.config_reader import read_text
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import Checkpoint, is_body_alone
from engine.errors import CheckpointError
from engine.execution.batch import ForwardItem, plan_batch
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
from engine.models.decoder import DecoderLayer, DenseMLP, ForwardBatch, MoeMLP
from engine.models.load import stream_decoder
from engine.models.placement import ModelPlacement
from engine.staging import ArrayStaging
from engine.text.tokenizer import Tokenizer
from kernels import cpu
from kernels.interface import Operations
from kernels.operands import ExpertLayout, ExpertOutputs, PackedWeight
from kernels.quantised import LARGEST_INT4, NIBBLE_ZERO, QuantisedWeight, WeightScheme, pack_nibbles, quantise

Tensor = torch.Tensor
MAX_PROMPTS_BYTES = 64 << 20
MAX_PROMPT_TOKENS = 2048  # of each prompt, its first
PASS_TOKENS = 8192  # of prompts that go through a layer together
BLOCK_SIZE = 16
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it: the paper's
LAZY_COLUMNS = 128  # columns whose errors reach those behind them in one product


def read_prompts(path: Path, tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """The first tokens of each line of a text file that is not empty. Raises CheckpointError naming the file."""
    lines = [line for line in read_text(path, max_bytes=MAX_PROMPTS_BYTES).splitlines() if line.strip()]
    prompts = [ids[: min(max_tokens, MAX_PROMPT_TOKENS)] for ids in tokenizer.encode_batch(lines) if ids]
    if not prompts:
        raise CheckpointError(f"{path}: holds no prompt; accepted: text, a prompt a line")
    return prompts


def calibrated(
    config: ModelConfig, checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], scheme: WeightScheme
) -> Iterator[tuple[str, QuantisedWeight]]:
    """The name of each layer's weights and what they are rounded to, with scales in their own dtype, layer by layer.

    One layer is in memory in float32, with the squares of its inputs and a row of float32 for each token.
    """
    inputs = LayerInputs()
    placement = ModelPlacement(
        device=torch.device("cpu"),
        dtype=torch.float32,
        ops=cast("Operations", inputs),
        max_positions=max(map(len, prompts)),
        bucketed_min_tokens=0,  # experts in `grouped_gemm` alone
    )
    model = stream_decoder(config, checkpoint, placement)
    batches = [_batch(part) for part in _parts(prompts)]
    states = []
    for batch in batches:
        x = model.embed_tokens.rows(batch.token_ids) * config.multipliers.embedding
        states.append((x, torch.zeros_like(x)))
    root = "" if is_body_alone(checkpoint.names()) else "model."
    for index, layer in enumerate(model.layers):
        inputs.squares.clear()
        with torch.inference_mode():
            states = [_through(layer, config, batch, *state) for batch, state in zip(batches, states, strict=True)]
        for name, squares in _of_tensors(config, f"{root}layers.{index}", layer, inputs.squares):
            weight = checkpoint.read(name)
            yield name, round_with_inputs(weight.float(), squares, scheme, weight.dtype)


def round_with_inputs(
    weight: Tensor, squares: Tensor, scheme: WeightScheme, scales_dtype: torch.dtype
) -> QuantisedWeight:
    """Round a weight [N, K] float32 to 4 bits, so that its products with inputs X [T, K] change little.

    squares: X^T X [K, K] float32. Inputs are rounded one after another, the largest first, and what each loses is made
    up for by those that are not rounded yet. Inputs that were always 0 are rounded to the nearest.
    """
    nearest = quantise(weight, scheme, scales_dtype)
    order = squares.diagonal().argsort(descending=True, stable=True)
    groups = order // nearest.group_size
    scales = nearest.scales.float()[:, groups]
    integers = torch.empty_like(weight)
    integers[:, order] = _rounded(weight[:, order], scales, _factor(squares[order][:, order]))
    return replace(nearest, values=pack_nibbles(integers + NIBBLE_ZERO))


def _factor(squares: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped inverse, float32: row k says what the loss of input k does to others."""
    damped = squares.double()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def _rounded(weight: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Integers [N, K] in the order of rounding; weight and scales [N, K], factor [K, K], likewise."""
    rest, integers = weight.clone(), torch.empty_like(weight)
    width = weight.shape[1]
    for start in range(0, width, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, width)
        losses = torch.empty(weight.shape[0], end - start)
        for column in range(start, end):
            scale = scales[:, column]
            rounded = (rest[:, column] / scale).round_().clamp_(-LARGEST_INT4, LARGEST_INT4)
            loss = (rest[:, column] - rounded * scale) / factor[column, column]
            rest[:, column:end].addr_(loss, factor[column, column:end], alpha=-1)
            integers[:, column], losses[:, column - start] = rounded, loss
        rest[:, end:].addmm_(losses, factor[start:end, end:], alpha=-1)
    return integers


class LayerInputs:
    """`kernels.cpu`, noting of each product X^T X of its inputs: [K, K] float32, of experts [E, K, K]."""

    def __init__(self) -> None:
        self.squares: dict[PackedWeight, Tensor] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(cpu, name)

    def linear(self, x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
        """See `Operations.linear`."""
        self._squares_of(weight).addmm_(x.t(), x)
        return cpu.linear(x, weight, gated=gated)

    def grouped_gemm(
        self, x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
    ) -> Tensor:
        """See `Operations.grouped_gemm`."""
        squares = self._squares_of(weight)
        rows = x.index_select(0, layout.pair_ids // layout.top_k) if gather else x
        for run, part in zip(layout.runs, torch.split(rows, layout.run_lens), strict=True):
            squares[run.expert].addmm_(part.t(), part)
        return cpu.grouped_gemm(x, weight, layout, gather=gather, gated=gated)

    def _squares_of(self, weight: PackedWeight) -> Tensor:
        *lead, _, width = weight.shape
        return self.squares.setdefault(weight, torch.zeros(*lead, width, width))


def _of_tensors(
    config: ModelConfig, prefix: str, layer: DecoderLayer, squares: Mapping[PackedWeight, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a layer that is rounded, with the squares of its inputs."""
    attention, mlp = layer.attention, layer.mlp
    is_fused = config.fuses_projections
    qkv = ["qkv_proj"] if is_fused else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if is_fused else ["gate_proj", "up_proj"]
    for names, weight in ((qkv, attention.qkv_proj), (["o_proj"], attention.o_proj)):
        yield from ((f"{prefix}.self_attn.{name}.weight", squares[weight]) for name in names)
    if isinstance(mlp, DenseMLP):
        for names, weight in ((gate_up, mlp.gate_up_proj), (["down_proj"], mlp.down_proj)):
            yield from ((f"{prefix}.mlp.{name}.weight", squares[weight]) for name in names)
    elif config.moe is not None and isinstance(mlp, MoeMLP):
        if mlp.shared is not None and config.moe.shared is not None:
            *gate_up, down = config.moe.shared.projections
            for names, weight in ((gate_up, mlp.shared.gate_up_proj), ([down], mlp.shared.down_proj)):
                yield from ((f"{prefix}.{config.moe.shared.module}.{name}.weight", squares[weight]) for name in names)
        *gate_up, down = config.moe.names.projections
        experts = f"{prefix}.{config.moe.names.module}.experts"
        for names, weight in ((gate_up, mlp.gate_up_proj), ([down], mlp.down_proj)):
            for expert, of_expert in enumerate(squares[weight]):
                yield from ((f"{experts}.{expert}.{name}.weight", of_expert) for name in names)


def _parts(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Prompts in their order, up to PASS_TOKENS together."""
    part: list[Sequence[int]] = []
    for prompt in prompts:
        if part and sum(map(len, part)) + len(prompt) > PASS_TOKENS:
            yield part
            part = []
        part.append(prompt)
    yield part


def _batch(prompts: Sequence[Sequence[int]]) -> ForwardBatch:
    """Prompts as one pass, their blocks one after another behind the null block."""
    items, first = [], 1
    for prompt in prompts:
        blocks = range(first, first - (-len(prompt) // BLOCK_SIZE))
        items.append(ForwardItem(prompt, 0, blocks, wants_logits=False))
        first = blocks.stop
    planned = plan_batch(items, BLOCK_SIZE)
    return planned.on_device(ArrayStaging(torch.device("cpu")).send(planned.arrays))


def _through(
    layer: DecoderLayer, config: ModelConfig, batch: ForwardBatch, x: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """What a layer makes of a pass, with a KV cache of its own; experts are added up, to keep one row a token."""
    spec = KVCacheSpec(1, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32)
    kv_cache = KVCacheTensors.allocate(spec, int(batch.slot_mapping.max()) // BLOCK_SIZE + 1, torch.device("cpu"))
    added, residual = layer.forward(x, residual, batch, kv_cache.keys[0], kv_cache.values[0])
    return cpu.combine_experts(*added) if isinstance(added, ExpertOutputs) else added, residual
