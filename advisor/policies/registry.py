"""Policies by name, for a sidecar's configuration and for the replay lab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ...graph.ranking.formulas import ClassicPolicy, LruPolicy
from ...graph.ranking.policy import Policy, Weighted, Weights
from .lifecycle import LifecyclePolicy

POLICIES: Final[dict[str, Callable[[Weights | None], Policy]]] = {
    ClassicPolicy.name: ClassicPolicy,
    LifecyclePolicy.name: LifecyclePolicy,
    LruPolicy.name: lambda weights: LruPolicy(),
}
"""Name → factory, called with the weights; a policy without weights ignores them."""

DEFAULT: Final = LifecyclePolicy.name  # the policy of a sidecar without any configuration


def new_policy(name: str, weights: Weights | None = None) -> Policy:
    return POLICIES[name](weights)


def set_weights(policy: Policy, weights: Weights) -> None:
    """Replace the weights of a policy, if it has any; it keeps what it learned."""
    if isinstance(policy, Weighted):
        policy.weights = weights


@contextmanager
def weighing(policy: Policy, weights: Weights | None) -> Iterator[None]:
    """Give a policy other weights within a context, under the graph's lock; None: its own."""
    if weights is None or not isinstance(policy, Weighted):
        yield
        return
    before, policy.weights = policy.weights, weights
    try:
        yield
    finally:
        policy.weights = before
