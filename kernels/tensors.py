"""Names for arrays in signatures: torch's on any device, numpy's in host memory."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["Bools", "Int64s", "Integers", "Numbers", "Tensor"]

Bools: TypeAlias = npt.NDArray[np.bool_]
Int64s: TypeAlias = npt.NDArray[np.int64]
Integers: TypeAlias = npt.NDArray[np.integer]  # of any width, such as numpy's own indices
Numbers: TypeAlias = int | Integers | Tensor  # whole numbers that broadcast with each other


# Every error that the kernels raise on purpose.
#
# KernelError ├── LayoutError a layout that cannot be described, or two that do not fit each
# other ├── SlotError a block, slot or handle outside of what the memory holds ├── RopeError
# positions that cannot be re-anchored; names the model and the reason ├── BuildError a kernel
# could not be compiled, or a part needed for it is missing ├── StorageError the disk tier
# cannot be opened or written └── TransferError the GPU's driver refused a copy or a launch, or
# to page-lock memory


class KernelError(Exception):
    """Base of every deliberate error of ``kvgraph.kernels``."""


class LayoutError(KernelError):
    """A layout is impossible, or two layouts do not fit each other."""


class SlotError(KernelError):
    """A block, slot or handle is out of range or no longer valid."""


class RopeError(KernelError):
    """The model's positions cannot be re-anchored; the message names model and reason."""


class BuildError(KernelError):
    """A kernel could not be compiled; the message says what is missing and how to get it."""


class StorageError(KernelError):
    """The disk tier cannot be opened or written."""


class TransferError(KernelError):
    """The GPU's driver refused a copy or a launch, or to page-lock memory; holds its error."""
