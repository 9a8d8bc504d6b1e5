"""What others do in place of one fused move, written from scratch: for comparison and nothing else.

Each works on memories whose blocks are single runs (``BLHNC``), in host memory too, and leaves the
same bytes as our operation. Addresses and index tensors are made beforehand, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from kvgraph.kernels import ops
from kvgraph.kernels.layout import PagedKv
from kvgraph.kernels.rope import Pairing, Rope


class Engine(Protocol):
    """What copies runs between addresses: the driver's batches, or a stand-in."""

    def copy(self, sources: Any, targets: Any, size: int, stream: int) -> None:
        """Queue copies of ``size`` bytes; see ``CopyEngine.copy``."""


class BatchedCopy:
    """One driver call with a descriptor a page."""

    def __init__(self, engine: Engine, source: PagedKv, records: Any, target: PagedKv, blocks: Any):
        self._engine = engine
        self._sources = _addresses(source, records)
        self._targets = _addresses(target, blocks)
        self._size = source.layout.block_bytes

    def __call__(self) -> None:
        self._engine.copy(self._sources, self._targets, self._size, _stream())


class IndexCopy:
    """torch alone: one gather into page-locked memory, one copy, one ``index_copy_``."""

    on_host = True  # the gather

    def __init__(self, source: PagedKv, records: Any, target: PagedKv, blocks: Any) -> None:
        self._pages, self._cache, self._records = _pages(source), _pages(target), records
        device = target.memory.device
        shape = len(records), self._pages.shape[1]
        pinned = device.type == "cuda"
        self._gathered = torch.empty(shape, dtype=source.memory.dtype, pin_memory=pinned)
        self._here = torch.empty(shape, dtype=source.memory.dtype, device=device)
        self._blocks = blocks.to(device)

    def __call__(self) -> None:
        torch.index_select(self._pages, 0, self._records, out=self._gathered)
        self._here.copy_(self._gathered, non_blocking=True)
        self._cache.index_copy_(0, self._blocks, self._here)


Swap = Callable[..., None]


class VllmSwap:
    """The call with which vLLM's own offloading moves pages from host memory to its cache."""

    def __init__(
        self, swap: Swap, source: PagedKv, records: Any, target: PagedKv, blocks: Any
    ) -> None:
        self._swap = swap
        self._sources = torch.from_numpy(_addresses(source, records))
        self._targets = torch.from_numpy(_addresses(target, blocks))
        self._sizes = torch.full_like(self._sources, source.layout.block_bytes)

    def __call__(self) -> None:
        # As vLLM does it: nothing writes to the host's pages meanwhile.
        self._swap(self._sources, self._targets, self._sizes, is_src_access_order_any=True)


def vllm_swap(page_bytes: int) -> Swap | None:
    """vLLM's own choice for pages of a size; None where no vLLM for GPUs can be imported."""
    try:
        from vllm.v1.kv_offload.cpu.gpu_worker import _select_swap_blocks_fn

        if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
            return None
        page = SimpleNamespace(page_size_bytes=page_bytes)
        chosen: Swap = _select_swap_blocks_fn([[page]], gpu_to_cpu=False)
    except Exception:  # another vLLM, or none
        return None
    return chosen if torch.cuda.is_available() else None


class CopyThenRotate:
    """A batched copy to the final place, then our own rotation in place: K passes memory twice."""

    def __init__(
        self, copy: BatchedCopy, target: PagedKv, new: Any, delta: Any, rope: Rope
    ) -> None:
        self._copy, self._target = copy, target
        self._new, self._delta, self._rope = new, delta, rope

    def __call__(self) -> None:
        self._copy()
        ops.rotate_in_place(self._target, self._new, self._delta, self._rope)


class ThreePasses:
    """Batched copy to a buffer, rotation of the buffer in torch, ``index_copy_`` to the pages."""

    def __init__(
        self, engine: Engine, source: PagedKv, records: Any, target: PagedKv, blocks: Any,
        delta: int, rope: Rope,
    ) -> None:  # fmt: skip
        count, device = len(records), target.memory.device
        layout = source.layout.record(count)
        buffer = torch.empty(layout.elements, dtype=layout.dtype, device=device)
        self._buffer = PagedKv(buffer, layout)
        self._copy = BatchedCopy(engine, source, records, self._buffer, torch.arange(count))
        self._cache, self._blocks = _pages(target), blocks.to(device)
        cos, sin = rope.rotation(torch.tensor([delta]))
        self._turn, self._rope = (cos.to(device), sin.to(device)), rope

    def __call__(self) -> None:
        self._copy()
        part = self._keys()
        first, second = self._halves(part)
        (cos, sin), a, b = self._turn, first.float(), second.float()
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)
        self._cache.index_copy_(0, self._blocks, _pages(self._buffer))

    def _keys(self) -> Any:
        cells = self._buffer.memory.view(-1, self._buffer.layout.cell)
        return cells[:, self._rope.start : self._rope.start + self._rope.dims]

    def _halves(self, part: Any) -> tuple[Any, Any]:
        half = self._rope.dims // 2
        if self._rope.pairing is Pairing.NEOX:
            return part[:, :half], part[:, half:]
        return part[:, 0::2], part[:, 1::2]


def _pages(kv: PagedKv) -> Any:
    return kv.memory[: kv.layout.elements].view(kv.layout.blocks, -1)


def _addresses(kv: PagedKv, blocks: Any) -> Any:
    step = kv.layout.block_stride * kv.layout.itemsize
    return kv.memory.data_ptr() + blocks.numpy() * step


def _stream() -> int:
    """Batches refuse the default stream, whose handle is 0: measure on another."""
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0
