"""One safetensors file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# A header entry takes about 150 bytes: room for 200,000 tensors, where Qwen3-235B has 36,945 over all its files.
MAX_HEADER_BYTES = 32 << 20
LENGTH_BYTES = 8  # of the header's length


class Shard:
    """One memory-mapped safetensors file: its header, and views of its tensors.

    Tensors of any dtype are described; one of a dtype that is not computed in is refused when it is asked for. Raises
    CheckpointError naming the file, and the tensor where one is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header_bytes = _header_bytes(path)
        self._file = _open(path)
        self.data_bytes = path.stat().st_size - LENGTH_BYTES - header_bytes  # safetensors leaves no gaps in between
        self._tensors = {name: self._describe(name) for name in self._file.keys()}  # noqa: SIM118 (not a dict)

    def names(self) -> frozenset[str]:
        """Every tensor in the file."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor, from the header."""
        return self._tensors[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header."""
        stored = self._tensors[name][1]
        if stored not in DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name} has dtype {stored}; accepted: {', '.join(DTYPES)}")
        return DTYPES[stored]

    def read(self, name: str) -> torch.Tensor:
        """A tensor that lies in the mapping, which lives as long as the tensor does."""
        self.dtype(name)  # refuses it
        try:
            tensor = cast(torch.Tensor, self._file.get_tensor(name))
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error
        # Writers that do not pad the header leave tensors at odd addresses, where vector instructions may not load.
        return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid."""
        self._file.__exit__(None, None, None)

    def _describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Its shape and the file's name for its dtype."""
        part = self._file.get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()


def _open(path: Path) -> Any:  # noqa: ANN401 (safetensors has no types)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {error}") from error
    except RuntimeError as error:  # torch's, where the kernel maps no file that is larger than the machine's memory
        raise CheckpointError(f"{path}: cannot be mapped into memory: {error}") from error


def _header_bytes(path: Path) -> int:
    """The header's length, with which a file begins; safetensors would believe up to 100 MB."""
    try:
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(start) < LENGTH_BYTES:
        raise CheckpointError(f"{path}: not a valid safetensors file: {len(start)} bytes long")
    header_bytes: int = struct.unpack("<Q", start)[0]
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {header_bytes} bytes; accepted: at most {MAX_HEADER_BYTES}")
    return header_bytes
