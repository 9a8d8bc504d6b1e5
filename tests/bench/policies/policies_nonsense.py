"""Policies that know nothing, or the opposite of what is true: what must not hurt anyone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from kvgraph.advisor.policies.registry import DEFAULT, new_policy
from kvgraph.graph.ranking.policy import Policy, Scores, Terms, View
from kvgraph.graph.tables.blocks import Selection

_SEED: Final = 20_261_121
Draw = Callable[[int], Scores]


class Oblivious:
    """Scores blocks without looking at them.

    Args:
        draw: ``blocks → float64 [blocks]``.
    """

    def __init__(self, name: str, draw: Draw) -> None:
        self.name = name
        self._draw = draw

    def observe(self, view: View) -> None:
        """There is nothing that it could learn."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, of no meaning."""
        return self._draw(len(picked))

    def terms(self, view: View, picked: Selection) -> Terms:
        """None: no score is made of anything."""
        return {}


class Reversed:
    """Lets go first what another policy would keep the longest."""

    def __init__(self, policy: Policy) -> None:
        self.name = f"reversed {policy.name}"
        self._policy = policy

    def observe(self, view: View) -> None:
        """Learn what the other policy learns."""
        self._policy.observe(view)

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, the other's with the wrong sign."""
        return -self._policy.scores(view, picked)

    def terms(self, view: View, picked: Selection) -> Terms:
        """The other's terms with the wrong sign."""
        terms = self._policy.terms(view, picked)
        return {name: -value for name, value in terms.items()}


def _random() -> Policy:
    return Oblivious("random", np.random.default_rng(_SEED).random)


NONSENSE: Final[dict[str, Callable[[], Policy]]] = {
    "constant": lambda: Oblivious("constant", np.zeros),
    "random": _random,
    "nan": lambda: Oblivious("nan", lambda blocks: np.full(blocks, np.nan)),
    "reversed": lambda: Reversed(new_policy(DEFAULT)),
}
"""Fresh policies by name."""
