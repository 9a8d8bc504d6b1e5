"""``Policy``: scores the blocks that an engine may lose.

One object serves the live sidecar and the replay lab. A policy only scores; the rules that bind
every policy (superseded first, protected last, a chain tail first) are laid over its scores by
``rules.lay_rules``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..errors import GraphError
from ..tables.blocks import Selection
from ..types import NO_ROW
from .profile import Weights
from .view import View

Scores = npt.NDArray[np.float64]
Terms = dict[str, Scores]
"""The parts of scores by their names, each ``[n]``; a score is their sum, apart from the tie by
depth."""


class Policy(Protocol):
    """Scores blocks from the graph's columns; may learn from them as they change.

    Called under the graph's lock. A policy with a memory learns in ``observe`` from what changed in
    the columns since its last look; it needs no events of its own.
    """

    @property
    def name(self) -> str:
        """The policy's name in configuration and replay."""

    def observe(self, view: View) -> None:
        """Learn from the columns, once before each ranking of an engine."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, higher goes first; changes nothing.

        A score beyond ``rules.SCORE_BOUND`` is clipped to it; NaN counts as the median.

        Args:
            picked: Rows that the view's engine holds in some tier.
        """

    def terms(self, view: View, picked: Selection) -> Terms:
        """The parts of each picked block's score, for people; changes nothing.

        Args:
            view: Of no engine in particular.
        """


def terms_of(policy: Policy, view: View, picked: Selection) -> Terms:
    """A policy's terms, which somebody else may have written.

    Args:
        view: Of an engine or of none.

    Raises:
        GraphError: They are not one number for each picked block.
    """
    terms = policy.terms(view.of(NO_ROW), picked)
    shapes = {name: np.shape(each) for name, each in terms.items()}
    if wrong := [f"{name} {shape}" for name, shape in shapes.items() if shape != (len(picked),)]:
        raise GraphError(
            f"the policy {policy.name} must tell one number for each of {len(picked)} blocks per "
            f"term; these have other shapes: {', '.join(wrong)}"
        )
    return terms


@runtime_checkable
class Weighted(Protocol):
    """A policy with configured weights, which may be assigned while it runs."""

    weights: Weights


@dataclass(frozen=True, slots=True)
class Ruling:
    """Who ranks an engine's blocks, for people.

    Attributes:
        policy_rules: Whether the policy ranks; otherwise LRU does.
        ahead: Blocks that the policy found more than LRU, lately; negative if LRU found more.
        changes: How often the ruling changed.
    """

    policy_rules: bool
    ahead: float
    changes: int


class Referee(Protocol):
    """Says, engine by engine, whether a policy may rank (otherwise the engine's own order holds),
    and how much may be kept whatever scores say.

    Called under the graph's lock.
    """

    @property
    def yields(self) -> bool:
        """Whether LRU ranks where the policy finds less; otherwise the policy ranks everywhere."""

    def watch(self, view: View, scores: Callable[[View, Selection], Scores]) -> None:
        """Compare what was found since the last ranking of an engine, and say in
        ``Tables.budgets`` how much of its pool may be kept whatever scores say.

        Args:
            scores: The policy's scores of any rows, under a view's rules, chains whole; higher goes
                first.
        """

    def trusts(self, engine: int) -> bool:
        """Whether the policy ranks this engine's blocks now."""

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone: the next one in its column has shown nothing yet."""

    def rulings(self) -> dict[int, Ruling]:
        """The ruling on each engine that is watched, by residency column."""
