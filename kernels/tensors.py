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
