"""``Scheduled``: a request that was scheduled; and how long one waited for that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..hints.tags import Meaning

_LONGEST_WAIT_S: Final = 86_400.0  # beyond, an arrival is by another clock; chosen


class Scheduled(NamedTuple):
    """A request that was scheduled, and is not over.

    Attributes:
        meaning: What its caller says of it.
        since: When it was first scheduled, by the observer's clock.
    """

    request: Request
    meaning: Meaning
    since: float


def waited_s(request: Request) -> float:
    """Seconds since a request arrived, for people to read; 0 where the clock was set meanwhile.

    By the wall clock: vLLM's API process dates arrivals by it.
    """
    waited = time.time() - request.arrival_time
    return waited if 0.0 < waited < _LONGEST_WAIT_S else 0.0
