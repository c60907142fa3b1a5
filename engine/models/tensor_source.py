"""Hands out a checkpoint's tensors, each once and in the shape that the model needs, with values or without."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from engine.checkpoint.weights import DTYPES, Checkpoint
from engine.errors import CheckpointError
from engine.models.placement import ModelPlacement
from kernels.operands import PackedWeight

SAMPLED_ELEMENTS = 64  # of each tensor


class TensorSource:
    """Hands out each tensor once, in the shape that the model needs; a tensor that nobody took is an error.

    Tensors are memory-mapped. Those that need no conversion and no fusing are used where they lie, the others copied
    one at a time: there is never a second copy of all weights in memory.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._left = set(checkpoint.names())
        self._digest = hashlib.blake2b(digest_size=16)

    def digest(self) -> str:
        """Hexadecimal digest of the first elements of each tensor taken so far, in the order of taking.

        Two fine-tunes of one model share the configuration, often the name too; they hardly share all of these.
        """
        return self._digest.hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name that nobody has taken."""
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor in the model dtype on the model's device."""
        return self._read(name, shape).to(device=self._device, dtype=self._dtype)

    def take_stored(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> torch.Tensor:
        """One tensor of one of these shapes and safetensors' dtypes, as it is on disk, on the model's device."""
        found = self._checkpoint.shape(name) if name in self._left else shapes[0]
        return self._read(name, found if found in shapes else shapes[0], dtypes).to(self._device)

    def take_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Matrices of one width stacked on top of each other, [sum of rows, width], or vectors put end to end."""
        if len(names) == 1:
            return self.take(names[0], shapes[0])
        rows = [shape[0] for shape in shapes]
        fused = self._empty((sum(rows), *shapes[0][1:]))
        self._copy_rows(fused, names, shapes)
        return fused

    def take_experts(self, names: Sequence[Sequence[str]], shapes: Sequence[tuple[int, int]]) -> torch.Tensor:
        """For each expert its matrices stacked on top of each other: [num_experts, rows, width]."""
        rows = sum(shape[0] for shape in shapes)
        stacked = self._empty((len(names), rows, shapes[0][1]))
        for expert, expert_names in enumerate(names):
            self._copy_rows(stacked[expert], expert_names, shapes)
        return stacked

    def drop_equal(self, name: str, other: torch.Tensor) -> None:
        """Skip the head of a tied checkpoint, where it is stored at all; it must equal the embedding."""
        if name not in self._left:
            return
        if not torch.equal(self.take(name, tuple(other.shape)), other):
            raise CheckpointError(f"tensor {name} differs from the embedding that config.json ties it to")

    def leave_out(self, *prefixes: str) -> None:
        """Skip the tensors whose names begin so: the model has no use for them, such as another task's head."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def release(self) -> None:
        """Give back the memory of the pages that were read so far; tensors used where they lie are read again."""
        self._checkpoint.release()

    def finish(self) -> None:
        """Raise CheckpointError if the checkpoint holds tensors that nobody took."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"the model has no place for tensor {', '.join(names[:3])}{more}")

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _copy_rows(self, target: torch.Tensor, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            target[row : row + shape[0]].copy_(self._read(name, shape))
            row += shape[0]

    def _read(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = tuple(DTYPES)) -> torch.Tensor:
        self._strike_off(name, shape)
        tensor = self._checkpoint.read(name, dtypes)
        self._digest.update(tensor.reshape(-1)[:SAMPLED_ELEMENTS].float().cpu().numpy().tobytes())
        return tensor

    def _strike_off(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError for a tensor that is not there, was taken before, or has another shape."""
        if name not in self._left:
            raise CheckpointError(f"tensor {name} is missing")
        found = self._checkpoint.shape(name)
        if tuple(found) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(found)}; config.json asks for {list(shape)}")
        self._left.remove(name)


class ShapeSource(TensorSource):
    """Does the same by the files' headers alone: its tensors have shape and dtype, and take no memory.

    0.3 s for the 18,867 tensors of Qwen3-30B-A3B.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, torch.device("meta"), torch.float32)

    def drop_equal(self, name: str, other: torch.Tensor) -> None:
        """Skip it likewise, where its shape is right; without values nobody knows whether it is equal."""
        if self.has(name):
            self.take(name, tuple(other.shape))

    def _read(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = tuple(DTYPES)) -> torch.Tensor:
        self._strike_off(name, shape)
        return torch.empty(shape, dtype=self._checkpoint.dtype(name, dtypes), device="meta")

    def _copy_rows(self, target: torch.Tensor, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        for name, shape in zip(names, shapes, strict=True):
            self._read(name, shape)


def head_weight(source: TensorSource, placement: ModelPlacement, name: str, shape: tuple[int, int]) -> PackedWeight:
    """The weight [classes, H] of a head of classes: in float32 whatever the model's dtype."""
    return placement.ops.pack(source.take(f"{name}.weight", shape).float(), keep_dtype=True)
