"""Whether prompts queue: only an engine that cannot keep up gains by letting some wait."""

from __future__ import annotations

from typing import Final

_REMEMBERED: Final = 64
"""Requests over which what they met fades to 1/e. Chosen."""
SATURATED: Final = 0.4
"""Share of requests that met others in the queue, from which on the engine counts as saturated.
Chosen in the closed loop of the replay lab, on other sessions than those of the figures: there an
engine that keeps up shows at most .2, and one whose cache thrashes 1. From .3 to .5 nothing
changes."""
AT_EASE: Final = 0.15
"""Below this share a saturated engine no longer counts as such. Chosen."""


class Saturation:
    """Follows how many of the requests that came lately met others in the engine's queue.

    It counts requests rather than seconds, so it means the same at any pace of users or engine.

    Attributes:
        share: Of these requests, later ones counting more.
        is_reached: Whether prompts queue so often that the engine has no time to spare.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self.is_reached = False

    def came(self, *, queued: bool) -> None:
        """Note a request that came.

        Args:
            queued: Others stood in the queue by then, or waited for room.
        """
        self.share += (float(queued) - self.share) / _REMEMBERED
        self.is_reached = self.share >= (AT_EASE if self.is_reached else SATURATED)
