"""``SaidText``: tokens that are kept, and compared with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

_Ids: TypeAlias = npt.NDArray[np.int32]
_BYTES: Final = 4  # of a token


@dataclass(frozen=True, slots=True)
class SaidText:
    """Tokens as bytes: most comparisons are of equal ones, and end with one look at these.

    Attributes:
        raw: int32 ``[tokens]``.
    """

    raw: bytes

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> SaidText:
        """Keep ``tokens``."""
        return cls(np.asarray(tokens, dtype=np.int32).tobytes())

    def __len__(self) -> int:
        return len(self.raw) // _BYTES

    def common(self, first: int, other: SaidText, at: int) -> int:
        """How many tokens are the same, from ``first`` on here and from ``at`` on in ``other``."""
        mine = self.raw[_BYTES * first :]
        theirs = other.raw[_BYTES * at : _BYTES * at + len(mine)]
        if mine == theirs:
            return len(mine) // _BYTES
        count = min(len(mine), len(theirs)) // _BYTES
        differ = np.flatnonzero(_ids(mine)[:count] != _ids(theirs)[:count])
        return int(differ[0]) if len(differ) else count


def _ids(raw: bytes) -> _Ids:
    return np.frombuffer(raw, dtype=np.int32)
