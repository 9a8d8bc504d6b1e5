"""Copies runs of bytes by the GPU's copy engines in one driver call, ``cuMemcpyBatchAsync`` (CUDA
12.8 and later). It is called through its pointer with numpy arrays, because the Python binding
would create an object per address. If the driver lacks or refuses it, each run is a
``cuMemcpyAsync``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from ..errors import BuildError, LayoutError, TransferError
from ..tensors import Integers

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
SINGLE: Final = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, _SIZE, _POINTER)
_HEAD: Final = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)
BATCH: Final = ctypes.CFUNCTYPE(ctypes.c_int, *_HEAD, _POINTER)
BATCH_12: Final = ctypes.CFUNCTYPE(ctypes.c_int, *_HEAD, _POINTER, _POINTER)  # says which failed
# CUmemcpyAttributes: the source is read in stream order; two location hints that only managed
# memory needs; a preference for engines that leave the multiprocessors to compute.
ATTRIBUTES: Final = np.array([1, 0, 0, 0, 0, 1], np.int32)
_FIRST: Final = np.zeros(1, np.uintp)

Function: TypeAlias = Callable[..., int]
Batch: TypeAlias = Callable[[Integers, Integers, Integers, int], int]


class CopyEngine:
    """The driver's asynchronous copies."""

    def __init__(self, single: Function, batch: Batch | None) -> None:
        self._single = single
        self._batch = batch
        # Why runs are copied one by one; None while they go in batches.
        self.problem = None if batch else "the driver has no cuMemcpyBatchAsync"

    def copy(self, sources: Integers, targets: Integers, size: int, stream: int) -> None:
        """Queue copies of ``size`` bytes each, in no order among themselves, between addresses,
        int64 [R], in page-locked host memory or a GPU's, on a CUDA stream that is not the default
        one. Raises TransferError.
        """
        if self._batch and len(sources):
            error = self._batch(sources, targets, np.full(len(sources), size, np.uintp), stream)
            if not error:
                return
            self._batch, self.problem = None, f"cuMemcpyBatchAsync gave error {error}"
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            error = self._single(target, source, size, stream)
            if error:
                raise TransferError(f"a copy of {size} bytes: the driver gives error {error}")


@functools.cache
def copy_engine() -> CopyEngine:
    """Return this process's copy engine; raises BuildError or TransferError."""
    single = _function("cuMemcpyAsync", 12000, SINGLE)
    if single is None:
        raise TransferError("the GPU's driver has no cuMemcpyAsync: it cannot be used")
    newest = _function("cuMemcpyBatchAsync", 13000, BATCH)
    older = None if newest else _function("cuMemcpyBatchAsync", 12080, BATCH_12)
    return CopyEngine(single, batched(newest, ()) if newest else batched(older, (None,)))


def batched(function: Function | None, extra: tuple[None, ...]) -> Batch | None:
    """Return ``cuMemcpyBatchAsync`` on numpy arrays; ``extra``: CUDA 12's arguments."""
    if not function:
        return None

    def batch(sources: Integers, targets: Integers, sizes: Integers, stream: int) -> int:
        return int(function(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sources),
            ATTRIBUTES.ctypes.data, _FIRST.ctypes.data, 1, *extra, stream,
        ))  # fmt: skip

    return batch


def check_page_locked(address: int, name: str) -> None:
    """Raise LayoutError for host memory that a GPU cannot read at its own address."""
    # Kernels and copies would fault: it is pageable, or this platform maps it elsewhere.
    driver = _driver()
    known = driver.CUpointer_attribute
    unknown, _ = driver.cuPointerGetAttribute(known.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    error, mapped = driver.cuPointerGetAttribute(known.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address)
    if int(unknown) or int(error) or int(mapped) != address:
        raise LayoutError(
            f"{name}: a GPU moves host memory that is page-locked and mapped at its own address;"
            " take it from an Arena that pins, and allocate its records first"
        )


def _function(name: str, version: int, prototype: Callable[[int], Function]) -> Function | None:
    error, pointer, _ = _driver().cuGetProcAddress(name.encode(), version, 0)
    return prototype(int(pointer)) if not int(error) and pointer else None


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BuildError("GPU copies need cuda.bindings: pip install 'kvgraph[cuda]'") from error
    return driver
