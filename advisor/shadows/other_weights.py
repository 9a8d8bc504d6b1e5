"""``OtherWeights``: a policy as it would score with weights and rules that are not in force."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.policy import Policy, Scores, Weighted
from ...graph.ranking.profile import Rules, Weights
from ...graph.ranking.scoring import resident_scores, whole_scores
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ...graph.types import Rows
from ..policies.registry import weighing


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """A policy with other weights and rules; it shares what the policy learns.

    Asked under the graph's lock: the policy is given these weights for as long as it scores.

    Attributes:
        weights: None for a policy that heeds none.
        said: Which these are, in words.
    """

    policy: Policy
    weights: Weights | None
    rules: Rules
    said: str = ""

    @classmethod
    def in_force(cls, graph: KVCacheGraph, said: str = "") -> OtherWeights:
        """Those that a graph has now, to be kept while it takes others."""
        policy = graph.policy
        weights = policy.weights if isinstance(policy, Weighted) else None
        return cls(policy, weights, graph.rules, said)

    def resident_scores(self, view: View) -> tuple[Rows, Scores]:
        """As ``scoring.resident_scores``."""
        with weighing(self.policy, self.weights):
            return resident_scores(replace(view, rules=self.rules), self.policy)

    def whole_scores(self, view: View, picked: Selection) -> Scores:
        """As ``scoring.whole_scores``."""
        with weighing(self.policy, self.weights):
            return whole_scores(replace(view, rules=self.rules), self.policy, picked)
