"""What engines really hold of sessions: asked of the sidecars, whose graphs know it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

import httpx
import orjson

from ....graph.ipc.runtime import RunningSidecar, running_sidecars
from ..fleet_router import Holdings

INTERVAL_S: Final = 1.0
"""Between two questions; chosen: a sidecar ranks twice a second."""
TIMEOUT_S: Final = 2.0
"""For a sidecar's answer; chosen."""
MOST_SESSIONS: Final = 1000  # the sidecar's own bound: those heard of last

_log = logging.getLogger(__name__)


class Held(NamedTuple):
    """What an engine holds of a session's last context, in shares of its tokens.

    Attributes:
        engine: As its sidecar calls it.
        pool: In its pool.
        copied: In its pool or in a tier below; at least ``pool``.
    """

    engine: str
    tokens: int
    pool: float
    copied: float


class ResidencyView:
    """Sessions as the sidecars of this user see them; a session that two tenants name is left out.

    Args:
        sidecars: Finds them.
    """

    def __init__(self, sidecars: Callable[[], list[RunningSidecar]] = running_sidecars) -> None:
        self._sidecars = sidecars
        self._held: dict[str, Held] = {}
        self._votes: dict[str, Counter[int]] = {}  # engine as its sidecar calls it → numbers
        self._hashing: dict[str, dict[str, str]] = {}  # by sidecar, engine → how, in words
        self._client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self.answered = 0

    def __len__(self) -> int:
        return len(self._held)

    async def watch(self) -> None:
        """Ask for ever."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Ask every sidecar once; who does not answer says nothing."""
        held: dict[str, Held] = {}
        for sidecar in self._sidecars():
            try:
                answer = await self._client.get(
                    f"{sidecar.http}/v1/sessions",
                    params={"limit": MOST_SESSIONS},
                    headers={"Authorization": f"Bearer {sidecar.token}"},
                )
                found = _sessions(answer.content)
                held.update(found)
                await self._look_at_hashing(sidecar, {each.engine for each in found.values()})
                self.answered += 1
            except (httpx.HTTPError, orjson.JSONDecodeError, KeyError, TypeError) as error:
                _log.debug("sidecar %s: %s", sidecar.http, type(error).__name__)
        self._held = held

    def note_home(self, name: str, engine: int) -> None:
        """Learn which engine is which: this session's home is the engine of this number.

        A session that moved a moment ago is said to be elsewhere: what most sessions say counts.
        """
        if (held := self._held.get(name)) is not None:
            self._votes.setdefault(held.engine, Counter())[engine] += 1

    def hashing(self, number: int) -> str:
        """By what an engine tells blocks apart, in words; empty while that is not known.

        An engine of several ranks has as many ways as these.
        """
        ways = {
            way
            for engines in self._hashing.values()
            for engine, way in engines.items()
            if way and self._number(engine) == number
        }
        return "; ".join(sorted(ways))

    def corrected(self, name: str, remembered: Holdings) -> Holdings:
        """What engines hold of a session's prompt.

        Args:
            remembered: What each should hold by what it got; the graph's word stands over it. What
                engines with a graph lost, it alone knows: they may evict in another order, and have
                copies.
        """
        pool, copied = remembered.pool.copy(), remembered.copied.copy()
        seen = remembered.seen.copy()
        seen[[number for each in self._votes if (number := self._number(each)) is not None]] = False
        held = self._held.get(name)
        number = None if held is None else self._number(held.engine)
        if held is None or number is None:
            return remembered._replace(seen=seen)
        context = max(int(pool[number]), held.tokens)
        pool[number], copied[number] = held.pool * context, held.copied * context
        seen[number] = True
        return remembered._replace(pool=pool, copied=copied, seen=seen)

    def _number(self, engine: str) -> int | None:
        votes = self._votes.get(engine)
        return votes.most_common(1)[0][0] if votes else None

    async def _look_at_hashing(self, sidecar: RunningSidecar, engines: set[str]) -> None:
        """Ask how engines hash blocks, once of each: it stays so while they run."""
        if engines <= self._hashing.get(sidecar.http, {}).keys():
            return
        answer = await self._client.get(f"{sidecar.http}/status")
        told = {
            each["id"]: str(each.get("hashing", ""))
            for each in orjson.loads(answer.content)["engines"]
        }
        self._hashing[sidecar.http] = {each: told.get(each, "") for each in engines}

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()


def _sessions(content: bytes) -> dict[str, Held]:
    found: dict[str, Held] = {}
    twice: set[str] = set()
    for each in orjson.loads(content)["sessions"]:
        name, chain = each["session"], each["chain"]
        if name in found:
            twice.add(name)
        if each["engine"] is not None and chain > 0:
            pool, copied = each["chain_pool"] / chain, each["chain_copied"] / chain
            found[name] = Held(each["engine"], each["tokens"], pool, copied)
    return {name: held for name, held in found.items() if name not in twice}
