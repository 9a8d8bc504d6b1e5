"""How soon another request may start although there is no room for it."""

from __future__ import annotations

import math
from typing import Final

_REST: Final = 0.1
"""Of the time that its prompt took, the engine is left alone after each. Chosen in the closed loop
of the replay lab, on other sessions than those of the figures."""


class Pacing:
    """Spaces out requests that start without room: each evicts blocks that another request needs.

    It measures time by prompts, not by seconds: a machine that computes a prompt in half the time
    starts twice as many.
    """

    def __init__(self) -> None:
        self._began: float | None = None  # when the last one started; None: its prompt is computed
        self._from = -math.inf
        self._free = False

    def begin(self, now: float) -> None:
        """Note that a request starts."""
        self._began = now

    def looks(self, now: float, free: bool) -> None:
        """Note at each step whether the engine could take another request.

        Args:
            free: No request is queued, and the prompt of the last one released has been computed.
        """
        self._free = free
        if free and self._began is not None:
            self._from = now + _REST * (now - self._began)
            self._began = None

    def may_start(self, now: float, *, hurries: bool) -> bool:
        """Whether another may start; with ``hurries``, without a rest."""
        return self._free and (hurries or now >= self._from)
