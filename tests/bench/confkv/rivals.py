"""Other orders of eviction, in the same cache and attention path: only who goes first differs.

Each is the rule of its authors for one token of one layer, without their separate choice for each
head, and applied again whenever the budget is full, also to what is generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from kvgraph.hooks.confkv.layer import mean_of_queries
from torch import Tensor

_EVERY_QUERY: Final = 1 << 30
_HISTORY: Final = 400  # steps that Scissorhands remembers, as in its paper
_OBSERVED: Final = 32  # queries that SnapKV looks at, as in its paper
POOLED: Final = 7  # neighbours that SnapKV takes the mean of, likewise
_SINKS: Final = 4  # first tokens that StreamingLLM keeps


class _Blind:
    """Remembers nothing of attention."""

    __slots__ = ()

    def first(self, mass: Tensor) -> Tensor:
        """Nothing."""
        return mass[:, -1] * 0.0

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        """Nothing."""
        return memory


@dataclass(frozen=True, slots=True)
class Window(_Blind):
    """The newest tokens stay, and with ``sinks`` the first of the text (StreamingLLM)."""

    sinks: int = 0
    queries: int = 1

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """The position; sinks stand above all."""
        score = position.to(torch.float32)
        return score.masked_fill(position < self.sinks, torch.inf)


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """H2O: the tokens that were paid the most attention since the start."""

    queries: int = _EVERY_QUERY

    def first(self, mass: Tensor) -> Tensor:
        """The sum over the prompt's queries."""
        return mass.sum(1)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        """The sum so far."""
        return memory + mass

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """The sum."""
        return memory


@dataclass(frozen=True, slots=True)
class Scissorhands:
    """The tokens that were most often paid more than their equal share, lately."""

    queries: int = _HISTORY

    def first(self, mass: Tensor) -> Tensor:
        """How many of the prompt's last queries did."""
        return (mass * mass.shape[2] > 1.0).float().sum(1)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        """The count, of which the oldest part is forgotten."""
        return memory * (1.0 - 1.0 / _HISTORY) + (mass * mass.shape[1] > 1.0).float()

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """The count."""
        return memory


@dataclass(frozen=True, slots=True)
class SnapKV:
    """The tokens in whose neighbourhood the last queries looked; PyramidKV with falling budgets."""

    queries: int = _OBSERVED

    def first(self, mass: Tensor) -> Tensor:
        """The mean of the prompt's last queries."""
        return mean_of_queries(mass)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        """A moving mean over as many."""
        return memory.lerp(mass, 1.0 / _OBSERVED)

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """The mean over neighbours in the cache."""
        pooled = torch.nn.functional.avg_pool1d(
            memory[:, None], POOLED, stride=1, padding=POOLED // 2
        )
        return pooled[:, 0]


@dataclass(frozen=True, slots=True)
class Random(_Blind):
    """Anybody; ``seed`` makes it the same anybody each time."""

    seed: int = 1
    queries: int = 1

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """Numbers that depend on the newest position and the seed alone."""
        newest = int(position.max()) if position.numel() else 0
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + newest)
        return torch.rand(memory.shape, generator=generator)


WINDOW, STREAMING = Window(), Window(_SINKS)
