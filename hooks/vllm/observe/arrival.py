"""How long a request waited, by the wall clock: vLLM's API process dates arrivals by it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LONGEST_WAIT_S: Final = 86_400.0  # beyond, an arrival is by another clock; chosen


def waited_s(request: Request) -> float:
    """Seconds since a request arrived, for people to read; 0 where the clock was set meanwhile."""
    waited = time.time() - request.arrival_time
    return waited if 0.0 < waited < _LONGEST_WAIT_S else 0.0
