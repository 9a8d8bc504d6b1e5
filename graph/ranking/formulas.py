"""Policies that are one expression over columns: the classic weighted sum, and LRU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..tables.blocks import DEPTH_TIE, Selection
from ..types import BlockFlag, EdgeType, Rows
from .policy import Policy, Scores, Terms, View, Weights
from .rules import flagged

Term = list[tuple[float, npt.NDArray[Any]]]
Values = Callable[[EdgeType, Selection], npt.NDArray[Any]]
_OF_CHAINS: Final = (EdgeType.PREFIX_SHARE, EdgeType.TEMPORAL)  # as in ``core.chain_worth``


class ClassicPolicy:
    """The weighted sum of ``Weights``."""

    name: Final = "classic"

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights or Weights()

    def observe(self, view: View) -> None:
        """Does nothing: the weights are configuration."""

    def detached(self, view: View, sessions: Rows) -> Policy:
        """Return the same policy with its present weights."""
        return ClassicPolicy(self.weights)

    def scores(self, view: View, picked: Selection) -> Scores:
        """Return the sums, float64 ``[len(picked)]``; the same on every engine."""
        scores = np.multiply(picked.of(view.blocks.depth), DEPTH_TIE, dtype=np.float64)
        scratch = np.empty(len(scores))
        for term in score_terms(view, self.weights, picked).values():
            for weight, values in term:
                scores += np.multiply(values, weight, out=scratch)
        return scores

    def terms(self, view: View, picked: Selection) -> Terms:
        """Return every term of the sum."""
        return {
            name: sum((weight * values for weight, values in term), np.zeros(len(picked)))
            for name, term in score_terms(view, self.weights, picked).items()
        }


class LruPolicy:
    """The engine's own order: the longest unused block goes first."""

    name: Final = "lru"

    def observe(self, view: View) -> None:
        """Does nothing: LRU learns nothing."""

    def detached(self, view: View, sessions: Rows) -> Policy:
        return self

    def scores(self, view: View, picked: Selection) -> Scores:
        """Return the seconds since each block's last use, float64 ``[len(picked)]``."""
        idle = view.now - picked.last_used()
        return np.asarray(idle + picked.of(view.blocks.depth) * DEPTH_TIE)

    def terms(self, view: View, picked: Selection) -> Terms:
        """Return the age, which is the whole score apart from the tie-break by depth."""
        return {"age": view.now - picked.last_used()}


def score_terms(view: View, weights: Weights, picked: Selection) -> dict[str, Term]:
    """Return the score's terms: for each, its weights and the values, ``[n]`` each, that they
    multiply.
    """
    return {
        "age": [(weights.age, view.now - picked.last_used())],
        **_graph_terms(view, weights, picked),
        "hit_count": [(weights.hit_count, picked.of(view.blocks.hit_count))],
        "session_credit": [(weights.session_credit, _credit(view, picked))],
    }


def graph_worth(view: View, weights: Weights, picked: Selection) -> npt.NDArray[np.float64]:
    """Return the points for everything except time that the graph knows of blocks, float64
    ``[len(picked)]``: edges, importance, and the model's confidence.
    """
    worth, kinds, blocks = np.zeros(len(picked)), view.rules.edge_types, view.blocks
    others: dict[EdgeType, float] = {
        kind: weight for kind, weight in kinds.items() if kind not in _OF_CHAINS
    }
    edges = view.tables.all_edges
    for term in (
        _over_types(weights.degree, others, edges.degree, view, picked),
        _over_types(weights.edge_weight, others, edges.weight, view, picked),
        _surer(weights.confidence, view, picked),
    ):
        for weight, values in term:
            worth -= weight * values
    degrees, of_edges = (
        [factor * kinds.get(kind, 0.0) for kind in _OF_CHAINS]
        for factor in (weights.degree, weights.edge_weight)
    )
    core.chain_worth(
        picked.of(blocks.parent), picked.of(blocks.depth), picked.of(blocks.walkers),
        picked.of(blocks.children), picked.of(blocks.shared_children),
        picked.of(blocks.children_walks), picked.of(blocks.importance),
        np.array([*degrees, *of_edges, weights.importance]), worth,
    )  # fmt: skip
    return worth


def _graph_terms(view: View, weights: Weights, picked: Selection) -> dict[str, Term]:
    edges, kinds = view.tables.all_edges, view.rules.edge_types
    return {
        "degree": _over_types(weights.degree, kinds, edges.degree, view, picked),
        "edge_weight": _over_types(weights.edge_weight, kinds, edges.weight, view, picked),
        "importance": [(weights.importance, picked.of(view.blocks.importance))],
        "confidence": _surer(weights.confidence, view, picked),
    }


def _over_types(
    factor: float, kinds: Mapping[EdgeType, float], values: Values, view: View, picked: Selection
) -> Term:
    """One weight and one array of values per edge type; types without an edge or a weight are left
    out.
    """
    return [
        (factor * weight, values(kind, picked))
        for kind, weight in kinds.items()
        if weight and view.tables.all_edges.may_have(kind)
    ]


def _surer(factor: float, view: View, picked: Selection) -> Term:
    """By how much surer the model was than in the mean when it wrote to each block's session; left
    out where no session was sampled.
    """
    confidence = view.sessions.confidence[: view.sessions.size]
    sampled = confidence >= 0
    if not factor or not sampled.any():
        return []
    surer = np.zeros(len(confidence) + 1)  # of those sampled, and for NO_ROW
    surer[:-1][sampled] = confidence[sampled] - confidence[sampled].mean()
    return [(factor, np.take(surer, picked.of(view.blocks.session), mode="wrap"))]


def _credit(view: View, picked: Selection) -> Scores:
    sessions, session = view.sessions, picked.of(view.blocks.session)
    present = sessions.among(session)
    credit = np.empty(sessions.size + 1)  # of those present, and for NO_ROW
    credit[-1] = 0.0
    credit[present] = sessions.credit(view.now, view.rules.session_memory_s, present)
    claimed = np.take(credit, session, mode="wrap")
    superseded = flagged(view, picked, BlockFlag.SUPERSEDED)
    if superseded.any():
        claimed[superseded] = 0.0
    return claimed
