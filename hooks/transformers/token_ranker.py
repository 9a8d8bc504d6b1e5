"""Who goes first: what a cache remembers of each token's attention, and the score made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Ranker(Protocol):
    """Orders the tokens of a layer; the lowest scores are evicted first.

    What it remembers of a token is one float32, which moves with the token.

    Attributes:
        queries: How many of a prompt's last queries it wants to hear of; at least 1.
    """

    @property
    def queries(self) -> int: ...

    def first(self, mass: Tensor) -> Tensor:
        """What to remember of a prompt's tokens.

        Args:
            mass: float32 [batch, queries, tokens], attention of the prompt's last queries, averaged
                over heads; a query's row sums to 1.

        Returns:
            float32 [batch, tokens].
        """

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        """What to remember after a step that paid ``mass`` to each token, both [batch, tokens]."""

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """Scores of tokens, all [batch, tokens].

        Args:
            position: int64, where tokens stood in the text.
            open_to: bool, which of them may be evicted; the others' scores do not matter.
        """


@dataclass(frozen=True, slots=True)
class AttentionAndRecency:
    """α · moving average of attention + (1 − α) · recency, each scaled to 0 … 1 in the layer."""

    alpha: float
    gamma: float
    queries: int = 64

    def first(self, mass: Tensor) -> Tensor:
        """The mean attention of the prompt's last queries."""
        return mean_of_queries(mass)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        """The moving average, one step on."""
        return memory.lerp(mass, 1.0 - self.gamma)

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """Both terms over what may be evicted."""
        attention = scaled(memory, open_to)
        recency = scaled(position.to(memory.dtype), open_to)
        return self.alpha * attention + (1.0 - self.alpha) * recency


def mean_of_queries(mass: Tensor) -> Tensor:
    """Mean over queries of mass [batch, queries, tokens]; padding in front has none, and does not
    count."""
    present = (mass.sum(2) > 0.0).sum(1, keepdim=True).clamp_min(1)
    return mass.sum(1) / present


def scaled(values: Tensor, among: Tensor) -> Tensor:
    """Values [batch, tokens] between the least and the greatest ``among`` them, as 0 … 1."""
    least = torch.where(among, values, torch.inf).amin(1, keepdim=True)
    most = torch.where(among, values, -torch.inf).amax(1, keepdim=True)
    return (values - least) / (most - least).clamp_min(torch.finfo(values.dtype).tiny)
