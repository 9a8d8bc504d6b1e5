"""Decides which of several instances a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ..traces.trace import Trace
from .instance import Instance


class RoundRobin:
    """One instance after the other, whatever the request."""

    def __init__(self) -> None:
        self._turn = count()

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        return next(self._turn) % len(instances)


class PrefixAffinity:
    """The instance where most of the prompt is cached, the tier below included.

    Among equals, the one where the least runs, then the one to which the least was sent.

    Args:
        share: Share of the prompt that must be cached for a match to count: otherwise every prompt
            would follow the system prompt that all share to one instance.
        below: Whether copies in the tier below count; those that all instances share tell nothing.
    """

    def __init__(self, trace: Trace, share: float = 0.5, below: bool = True) -> None:
        self._chains = trace.chains()
        self._limits = trace.matchable.tolist()
        self._share = share
        self._below = below
        self._sent: dict[int, int] = {}

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        chain, limit = self._chains[request], self._limits[request]
        reach = Instance.reach if self._below else Instance.match
        matches = [reach(instance, chain, limit) for instance in instances]
        enough = max(matches) >= self._share * max(1, limit)

        def merit(number: int) -> tuple[int, int, int]:
            instance = instances[number]
            return (matches[number] if enough else 0, -instance.running, -self._sent.get(number, 0))

        best = max(range(len(instances)), key=merit)
        self._sent[best] = self._sent.get(best, 0) + len(chain)
        return best


class SessionSticky:
    """A session stays where it began; a new one goes where live sessions hold the least KV.

    Args:
        live_s: A session that was idle for more seconds no longer counts.
    """

    def __init__(self, trace: Trace, live_s: float = 300.0) -> None:
        self._session = trace.session.tolist()
        self._blocks = [len(chain) for chain in trace.chains()]
        self._at = trace.at.tolist()
        self._live_s = live_s
        self._home: dict[int, int] = {}
        self._held: dict[int, tuple[float, int]] = {}  # session, idle longest first → (seen, KV)

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        session, now = self._session[request], self._at[request]
        self._forget_idle(now)
        if session not in self._home:
            held = [0] * len(instances)
            for other, (_, blocks) in self._held.items():
                held[self._home[other]] += blocks
            self._home[session] = held.index(min(held))
        self._held.pop(session, None)
        self._held[session] = (now, self._blocks[request])
        return self._home[session]

    def _forget_idle(self, now: float) -> None:
        while self._held:
            session, (seen, _) = next(iter(self._held.items()))
            if seen > now - self._live_s:
                return
            del self._held[session]
