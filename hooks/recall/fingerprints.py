"""``Fingerprints``: hashes of short windows of tokens, at any alignment."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int64]

# Multipliers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_HALF: Final = np.uint64(32)


class Fingerprints:
    """Multilinear hashes of windows; whoever finds an equal one compares the tokens themselves.

    Args:
        window: Tokens that a fingerprint covers.
        rng: Draws the coefficients: nobody outside of this process can make windows collide.
    """

    def __init__(self, window: int, rng: np.random.Generator) -> None:
        self.window = window
        top = np.iinfo(np.uint64).max
        self._factors = rng.integers(1, top, window, dtype=np.uint64) | np.uint64(1)

    def of(self, tokens: Tokens) -> list[int]:
        """Fingerprints of all windows of ``tokens``: of those at 0, at 1, and so on."""
        if len(tokens) < self.window:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(_mixed(tokens), self.window)
        return self._sums(windows)

    def apart(self, tokens: Tokens) -> list[int]:
        """Fingerprints of adjoining windows: of those at 0, at ``window``, and so on."""
        return self._sums(_mixed(tokens).reshape(-1, self.window))

    def _sums(self, windows: npt.NDArray[np.uint64]) -> list[int]:
        sums: list[int] = (windows * self._factors).sum(1, dtype=np.uint64).tolist()
        return sums


def _mixed(tokens: Tokens) -> npt.NDArray[np.uint64]:
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _FIRST
    return (mixed ^ (mixed >> _HALF)) * _SECOND
