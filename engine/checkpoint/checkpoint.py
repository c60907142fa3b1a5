"""The weights of a model directory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from engine.checkpoint.shard import Shard
from engine.checkpoint.weight_files import WeightFiles
from engine.errors import CheckpointError


class Checkpoint:
    """The tensors of one or many safetensors files under their names, memory-mapped.

    Opening reads the headers only. Whether the tensors are those of a model is for the model's loader to judge.
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
        opened: list[Shard] = []
        try:
            for file_name in files.file_names:
                shard = Shard(files.directory / file_name)
                opened.append(shard)
                for name in sorted(shard.names()):
                    if name in shards:
                        raise CheckpointError(f"{path}: tensor {name} is in {shards[name].path.name} and {file_name}")
                    shards[name] = shard
            if files.index is not None:
                _check_index(path, files.index, shards)
        except CheckpointError:
            for shard in opened:
                shard.close()
            raise
        return cls(shards)

    def names(self) -> frozenset[str]:
        """Every tensor."""
        return frozenset(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor. Raises CheckpointError if there is none of this name."""
        return self._shard(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor on disk. Raises CheckpointError as `read` does."""
        return self._shard(name).dtype(name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor in its shape and dtype on disk, memory-mapped: no bytes are read before they are used.

        It stays valid after `close`. Writing to it changes a private copy of the touched pages, never the file.
        Raises CheckpointError if there is none of this name, its dtype is none of float32, bfloat16 and float16, or the
        checkpoint was closed.
        """
        return self._shard(name).read(name)

    def close(self) -> None:
        """Close the files. May be called twice."""
        for shard in set(self._shards.values()):
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
