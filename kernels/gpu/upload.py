"""Brings small tensors to where a kernel reads them: packed, in one copy that nothing waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from ..tensors import Tensor

_ALIGNMENT: Final = 16  # bytes: the widest access of a kernel


def uploaded(tensors: Iterable[Tensor], device: str) -> tuple[Tensor, ...]:
    """The tensors, contiguous and on ``device``; those in host memory travel in one pinned buffer.

    A copy from pageable memory would first wait for all earlier work of the stream. The buffer
    comes from torch's cache of pinned memory, which keeps it until the copy is over.
    """
    tensors = [tensor.contiguous() for tensor in tensors]
    here = [tensor for tensor in tensors if not tensor.is_cuda]
    starts, size = [], 0
    for tensor in here:
        starts.append(size)
        size += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu")
    for tensor, start in zip(here, starts, strict=True):
        _part(packed, start, tensor).copy_(tensor)
    there = packed.to(device, non_blocking=True)
    parts = iter([_part(there, start, tensor) for tensor, start in zip(here, starts, strict=True)])
    return tuple(tensor if tensor.is_cuda else next(parts) for tensor in tensors)


def _part(packed: Tensor, start: int, like: Tensor) -> Tensor:
    part = packed[start : start + like.numel() * like.itemsize]
    return part.view(like.dtype).view(like.shape)
