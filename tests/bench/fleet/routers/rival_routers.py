"""Routers that other projects ship, as the demo plays them: each picks an engine for a request."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Sequence
from itertools import count
from typing import Final

from ...agents.agents_arms import Pick

_POINTS: Final = 160
"""Of one engine on the ring: what ketama gives a server, which made consistent hashing common."""


def round_robin() -> Pick:
    """One engine after the other, whose session it may be."""
    turns = count()
    return lambda session, running: next(turns) % len(running)


def consistent_hash(engines: int) -> Pick:
    """A session's requests all go to the engine whose point follows the session's on a ring."""
    ring = sorted(
        (_point(f"{number}-{point}"), number)
        for number in range(engines)
        for point in range(_POINTS)
    )
    places = [place for place, _ in ring]

    def pick(session: str, running: Sequence[int]) -> int:
        return ring[bisect.bisect(places, _point(session)) % len(ring)][1]

    return pick


def power_of_two(seed: int) -> Pick:
    """Of two engines at random, the one at which fewer requests run."""
    chance = random.Random(seed)

    def pick(session: str, running: Sequence[int]) -> int:
        one, other = chance.sample(range(len(running)), 2)
        return one if running[one] <= running[other] else other

    return pick


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
