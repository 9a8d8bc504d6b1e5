"""Where the kernels are checked: on a GPU, or the same sources in emulation on a CPU."""

from __future__ import annotations

import types
from typing import Any, Protocol

import torch
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.layout import KvLayout, PagedKv, new_memory

from . import emulation


class Place(Protocol):
    """A back end with memory of its own.

    Attributes:
        name: In the report.
        operations: Its ``Backend`` and ``Observer``.
    """

    name: str
    operations: types.ModuleType

    def put(self, tensor: Any) -> Any:
        """A copy of ``tensor`` where the kernels' cache is."""

    def arena(self, layout: KvLayout, blocks: int) -> PagedKv:
        """Host memory that its kernels can reach."""

    def finish(self) -> None:
        """Wait for what was queued."""


class Gpu:
    """The current CUDA device; importing its back end compiles nothing yet."""

    def __init__(self) -> None:
        from kvgraph.kernels.backends import device

        self.name = torch.cuda.get_device_name()
        self.operations: types.ModuleType = device
        self._arenas: list[Arena] = []

    def put(self, tensor: Any) -> Any:
        """See ``Place``."""
        return tensor.cuda()

    def arena(self, layout: KvLayout, blocks: int) -> PagedKv:
        """See ``Place``: page-locked, for as long as this object lives."""
        arena = Arena(layout)
        arena.allocate(blocks)
        self._arenas.append(arena)
        return arena.kv

    def finish(self) -> None:
        """See ``Place``."""
        torch.cuda.synchronize()


class Emulated:
    """A CPU that runs the CUDA sources as a GPU would."""

    name = "emulation on this CPU"
    operations: types.ModuleType = emulation

    def put(self, tensor: Any) -> Any:
        """See ``Place``."""
        return tensor.clone()

    def arena(self, layout: KvLayout, blocks: int) -> PagedKv:
        """See ``Place``."""
        return new_memory(layout)

    def finish(self) -> None:
        """See ``Place``: nothing is queued."""
