"""What engines really hold of sessions: asked of the sidecars, whose graphs know it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import httpx
import numpy as np
import orjson

from ....graph.ipc.runtime import RunningSidecar, running_sidecars
from ..engine_board import Tokens
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
        copied: In its pool or in a tier below.
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
        self._numbers: dict[str, int] = {}  # engine as its sidecar calls it → number
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
                held.update(_sessions(answer.content))
                self.answered += 1
            except (httpx.HTTPError, orjson.JSONDecodeError, KeyError, TypeError) as error:
                _log.debug("sidecar %s: %s", sidecar.http, type(error).__name__)
        self._held = held

    def sent(self, name: str, engine: int) -> None:
        """Learn which engine is which: this session is at the engine of this number."""
        if (held := self._held.get(name)) is not None:
            self._numbers.setdefault(held.engine, engine)

    def corrected(self, name: str, remembered: Tokens) -> Holdings:
        """What engines hold of a session's prompt.

        Args:
            remembered: int64 ``[engines]``, what each got of it; the graph's word stands over it.
        """
        held = self._held.get(name)
        number = None if held is None else self._numbers.get(held.engine)
        if held is None or number is None or number >= len(remembered):
            return Holdings(remembered, remembered)
        pool, copied = remembered.copy(), remembered.copy()
        context = max(int(remembered[number]), held.tokens)
        pool[number], copied[number] = held.pool * context, held.copied * context
        return Holdings(np.minimum(pool, copied), copied)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()


def _sessions(content: bytes) -> dict[str, Held]:
    found: dict[str, Held] = {}
    twice: set[str] = set()
    for each in orjson.loads(content)["sessions"]:
        name, blocks = each["session"], max(1, each["blocks"])
        if name in found:
            twice.add(name)
        if each["engine"] is not None:
            below = min(blocks, each["pool"] + each["warm"] + each["cold"])
            pool = min(1.0, each["pool"] / blocks)
            found[name] = Held(each["engine"], each["tokens"], pool, max(pool, below / blocks))
    return {name: held for name, held in found.items() if name not in twice}
