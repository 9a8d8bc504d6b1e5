"""Policies that are one expression over columns: the classic weighted sum, and LRU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..tables.blocks import DEPTH_TIE, Selection
from ..types import BlockFlag, EdgeType
from .policy import Scores, Terms, View, Weights
from .rules import flagged

Term = list[tuple[float, npt.NDArray[Any]]]
Values = Callable[[EdgeType, Selection], npt.NDArray[Any]]


class ClassicPolicy:
    """The weighted sum of ``Weights``."""

    name: Final = "classic"

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights or Weights()

    def observe(self, view: View) -> None:
        """Do nothing: the weights are configuration."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``; the same on every engine."""
        scores = np.multiply(picked.of(view.blocks.depth), DEPTH_TIE, dtype=np.float64)
        scratch = np.empty(len(scores))
        for term in score_terms(view, self.weights, picked).values():
            for weight, values in term:
                scores += np.multiply(values, weight, out=scratch)
        return scores

    def terms(self, view: View, picked: Selection) -> Terms:
        """Every term of the sum."""
        return {
            name: sum((weight * values for weight, values in term), np.zeros(len(picked)))
            for name, term in score_terms(view, self.weights, picked).items()
        }


class LruPolicy:
    """The engine's own order: the longest unused block goes first."""

    name: Final = "lru"

    def observe(self, view: View) -> None:
        """Do nothing."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``: seconds since the last use of each."""
        idle = view.now - picked.last_used()
        return np.asarray(idle + picked.of(view.blocks.depth) * DEPTH_TIE)

    def terms(self, view: View, picked: Selection) -> Terms:
        """The age, which is the whole score, apart from the tie by depth."""
        return {"age": view.now - picked.last_used()}


def score_terms(view: View, weights: Weights, picked: Selection) -> dict[str, Term]:
    """The score's terms: per term a list of weights and of the values, ``[n]``, that they
    multiply."""
    return {
        "age": [(weights.age, view.now - picked.last_used())],
        **_graph_terms(view, weights, picked),
        "hit_count": [(weights.hit_count, picked.of(view.blocks.hit_count))],
        "session_credit": [(weights.session_credit, _credit(view, picked))],
    }


def graph_worth(view: View, weights: Weights, picked: Selection) -> npt.NDArray[np.float64]:
    """float64 ``[len(picked)]``: points for what the graph knows besides time: edges, importance,
    and how sure the model is."""
    worth = np.zeros(len(picked))
    for term in _graph_terms(view, weights, picked).values():
        for weight, values in term:
            worth -= weight * values
    return worth


def _graph_terms(view: View, weights: Weights, picked: Selection) -> dict[str, Term]:
    edges = view.tables.all_edges
    return {
        "degree": _over_types(weights.degree, edges.degree, view, picked),
        "edge_weight": _over_types(weights.edge_weight, edges.weight, view, picked),
        "importance": [(weights.importance, picked.of(view.blocks.importance))],
        "confidence": _surer(weights.confidence, view, picked),
    }


def _over_types(factor: float, values: Values, view: View, picked: Selection) -> Term:
    """One weight and one array of values per edge type; types without an edge or a weight are left
    out."""
    return [
        (factor * weight, values(kind, picked))
        for kind, weight in view.rules.edge_types.items()
        if weight and view.tables.all_edges.may_have(kind)
    ]


def _surer(factor: float, view: View, picked: Selection) -> Term:
    """By how much surer the model was than in the mean when it wrote to each block's session; left
    out where no session was sampled."""
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
