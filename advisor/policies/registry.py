"""Policies by name: the one place that a sidecar's configuration and the replay lab ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...graph.ranking.policy import Policy
from ...graph.ranking.scoring import ClassicPolicy, LruPolicy, ScoreProfile
from .lifecycle import LifecyclePolicy

DEFAULT: Final = "lifecycle"
"""The policy of a sidecar without any configuration."""

POLICIES: Final[dict[str, Callable[[ScoreProfile | None], Policy]]] = {
    "classic": ClassicPolicy,
    "lifecycle": LifecyclePolicy,
    "lru": lambda profile: LruPolicy(),
}


def new_policy(name: str, profile: ScoreProfile | None = None) -> Policy:
    """A fresh policy.

    Args:
        name: A key of ``POLICIES``.
        profile: Weights of the policies that have some; None takes the defaults.
    """
    return POLICIES[name](profile)
