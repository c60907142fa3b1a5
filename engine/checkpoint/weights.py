"""Reads the weights of a checkpoint out of its safetensors."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Collection, Container
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.files import WeightFiles
from engine.errors import CheckpointError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Of tensors that only quantised layers have, by the names of safetensors; refused elsewhere.
STORED_DTYPES = {
    **DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
# A header entry takes about 150 bytes: room for 200,000 tensors, where Qwen3-235B has 36,945 over all its files.
MAX_HEADER_BYTES = 32 << 20
LENGTH_BYTES = 8  # of the header's length
METADATA = "__metadata__"  # of the file, beside the tensors in the header


class Checkpoint:
    """The tensors of one or many safetensors files under their names, memory-mapped.

    Opening reads the headers only. Whether the tensors are those of a model is the business of the model's loader.
    """

    def __init__(self, shards: dict[str, Shard]) -> None:
        """`shards` maps each tensor to the file it is in; `open` is the way to get one."""
        self._shards = shards
        self.total_bytes = sum(shard.data_bytes for shard in set(shards.values()))

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open the weights of a model directory.

        Raises CheckpointError naming file and tensor: no safetensors files, a damaged file, an index that does not
        say what the files hold.
        """
        files = WeightFiles.find(path)
        shards: dict[str, Shard] = {}
        with ExitStack() as opened:
            for file_name in files.file_names:
                shard = opened.enter_context(closing(Shard(files.directory / file_name)))
                for name in sorted(shard.names()):
                    if name in shards:
                        raise CheckpointError(f"{path}: tensor {name} is in {shards[name].path.name} and {file_name}")
                    shards[name] = shard
            if files.index is not None:
                _check_index(path, files.index, shards)
            opened.pop_all()  # from here on `close` closes them
        return cls(shards)

    def names(self) -> frozenset[str]:
        """Every tensor."""
        return frozenset(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor. Raises CheckpointError if there is none of this name."""
        return self._shard(name).shape(name)

    def dtype(self, name: str, accepted: Collection[str] = tuple(DTYPES)) -> torch.dtype:
        """Dtype of a tensor on disk. Raises CheckpointError as `read` does."""
        return self._shard(name).dtype(name, accepted)

    def read(self, name: str, accepted: Collection[str] = tuple(DTYPES)) -> torch.Tensor:
        """A tensor in its shape and dtype on disk, memory-mapped: no bytes are read before they are used.

        It stays valid after `close`. Writing to it changes a private copy of the touched pages, never the file; the
        next `release` undoes it.
        accepted: names of STORED_DTYPES. Raises CheckpointError if there is none of this name, its dtype is another, or
        the checkpoint was closed.
        """
        return self._shard(name).read(name, accepted)

    def release(self) -> None:
        """Give back the memory that the files' pages take in this process; what is used again is read again."""
        for shard in set(self._shards.values()):
            shard.release()

    def close(self) -> None:
        """Close the files. May be called twice."""
        for shard in set(self._shards.values()):
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shard(self, name: str) -> Shard:
        shard = self._shards.get(name)
        if shard is None:
            raise CheckpointError(f"tensor {name} is missing")
        return shard


def _check_index(path: Path, index: dict[str, str], shards: dict[str, Shard]) -> None:
    for name in sorted(index.keys() | shards.keys()):
        indexed = index.get(name)
        found = shards[name].path.name if name in shards else None
        if indexed is None:
            raise CheckpointError(f"{path}: tensor {name} is in {found} but not in the index")
        if found != indexed:
            raise CheckpointError(
                f"{path}: tensor {name} is not in {indexed}, where the index puts it"
                + (f", but in {found}" if found else "")
            )


class _StoredTensor(NamedTuple):
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # by safetensors' name
    start: int  # its first byte in the file


class Shard:
    """One memory-mapped safetensors file: its header, and views of its tensors.

    A tensor of a dtype that no model computes in is refused when it is asked for, not before. Raises CheckpointError
    naming the file, and the tensor where one is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header_bytes = _header_bytes(path)
        _check(path)
        self._mapping: mmap.mmap | None = _mapped(path)
        data = LENGTH_BYTES + header_bytes
        self.data_bytes = len(self._mapping) - data  # safetensors leaves no gaps in between
        header = json.loads(self._mapping[LENGTH_BYTES:data])
        self._tensors = {
            name: _StoredTensor(tuple(entry["shape"]), entry["dtype"], data + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != METADATA
        }

    def names(self) -> frozenset[str]:
        """Every tensor in the file."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor, from the header."""
        return self._tensors[name].shape

    def dtype(self, name: str, accepted: Collection[str]) -> torch.dtype:
        """Dtype of a tensor, from the header."""
        stored = self._tensors[name].dtype
        if stored not in accepted:
            raise CheckpointError(f"{self.path}: tensor {name} has dtype {stored}; accepted: {', '.join(accepted)}")
        return STORED_DTYPES[stored]

    def read(self, name: str, accepted: Collection[str]) -> torch.Tensor:
        """A tensor that lies in the mapping, which lives as long as the tensor does."""
        dtype, (shape, _, start) = self.dtype(name, accepted), self._tensors[name]
        if self._mapping is None:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: the file was closed")
        count = math.prod(shape)
        if count == 0:  # no part of a buffer
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start).view(shape)
        # Writers that do not pad the header leave tensors at odd addresses, where vector instructions may not load.
        return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor

    def release(self) -> None:
        """Take its pages out of this process, not out of the system's cache: what is used again is mapped again."""
        if self._mapping is not None:
            with suppress(AttributeError, OSError):  # a system without: pages stay until their memory is needed
                self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid."""
        self._mapping = None


def _check(path: Path) -> None:
    """Have safetensors read the header: shapes, dtypes and places of tensors fit each other and the file."""
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {error}") from error


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:  # also where the kernel maps no file that is larger than the machine's memory
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


def is_body_alone(names: Container[str]) -> bool:
    """Whether a decoder's tensors are named without `model.`, as a body alone is saved (Qwen3Model): it has no head."""
    return "embed_tokens.weight" in names
