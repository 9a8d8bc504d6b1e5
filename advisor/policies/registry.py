"""Policies by name: the one place that a sidecar's configuration and the replay lab ask."""

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
"""Each is made with the weights that it heeds; a policy without any passes over them."""

DEFAULT: Final = LifecyclePolicy.name
"""The policy of a sidecar without any configuration."""


def new_policy(name: str, weights: Weights | None = None) -> Policy:
    """A fresh policy.

    Args:
        name: A key of ``POLICIES``.
        weights: For the policies that have some; None takes the defaults.
    """
    return POLICIES[name](weights)


def set_weights(policy: Policy, weights: Weights) -> None:
    """Let a policy use other weights from now on, and keep what it learned; one without weights
    ignores them."""
    if isinstance(policy, Weighted):
        policy.weights = weights


@contextmanager
def weighing(policy: Policy, weights: Weights | None) -> Iterator[None]:
    """Let a policy heed other weights for a moment, under the graph's lock; None: those it has."""
    if weights is None or not isinstance(policy, Weighted):
        yield
        return
    before, policy.weights = policy.weights, weights
    try:
        yield
    finally:
        policy.weights = before
