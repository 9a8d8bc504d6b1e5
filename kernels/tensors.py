"""Array types for signatures, and the errors that the kernels raise."""

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


class KernelError(Exception):
    """Base of every deliberate error of ``kvgraph.kernels``."""


class LayoutError(KernelError):
    """A layout cannot be described, or two layouts do not fit each other."""


class SlotError(KernelError):
    """A block, slot or handle is out of range or no longer valid."""


class RopeError(KernelError):
    """The model's positions cannot be re-anchored; the message names model and reason."""


class BuildError(KernelError):
    """A kernel could not be compiled; the message says what is missing and how to get it."""


class StorageError(KernelError):
    """The disk tier cannot be opened or written."""


class TransferError(KernelError):
    """The GPU's driver refused a copy, a launch, or to page-lock memory; the message quotes its
    error."""
