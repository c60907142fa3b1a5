"""One safetensors file."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# 0, 1, 2, ... in int64: a buffer of BERT's that transformers before 4.31 saved.
IGNORED_SUFFIX = "embeddings.position_ids"
# A header entry takes about 150 bytes: room for 200,000 tensors, where Qwen3-235B has 36,945 over all its files.
MAX_HEADER_BYTES = 32 << 20


class Shard:
    """One memory-mapped safetensors file: its header, and views of its tensors.

    Raises CheckpointError naming the file, and the tensor where one is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header_size(path)
        self._file = _open(path)
        names = (name for name in self._file.keys() if not name.endswith(IGNORED_SUFFIX))  # noqa: SIM118 (not a dict)
        self._tensors = {name: self._describe(name) for name in names}

    def names(self) -> frozenset[str]:
        """Every tensor in the file, but for position_ids."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor, from the header."""
        return self._tensors[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header."""
        return self._tensors[name][1]

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor, from the header."""
        shape, dtype = self._tensors[name]
        return math.prod(shape) * dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        """A tensor that lies in the mapping, which lives as long as the tensor does."""
        try:
            tensor = cast(torch.Tensor, self._file.get_tensor(name))
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error
        # Writers that do not pad the header leave tensors at odd addresses, where vector instructions may not load.
        return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid."""
        self._file.__exit__(None, None, None)

    def _describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        part = self._file.get_slice(name)
        dtype = DTYPES.get(part.get_dtype())
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name} has dtype {part.get_dtype()}; accepted: {', '.join(DTYPES)}"
            )
        return tuple(part.get_shape()), dtype


def _open(path: Path) -> Any:  # noqa: ANN401 (safetensors has no types)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {error}") from error


def _check_header_size(path: Path) -> None:
    """A file begins with its header's length, which safetensors would believe up to 100 MB."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(start) < 8:
        raise CheckpointError(f"{path}: not a valid safetensors file: {len(start)} bytes long")
    (header_bytes,) = struct.unpack("<Q", start)
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {header_bytes} bytes; accepted: at most {MAX_HEADER_BYTES}")
