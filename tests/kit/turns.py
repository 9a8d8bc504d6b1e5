"""What an engine tells of a request, in blocks of 16 tokens, and a graph that is told so."""

from __future__ import annotations

from typing import Any

from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import Tier
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    RequestFinished,
    RequestStarted,
)
from wire_keys import pack

SIZE = 16


def stored(*keys: int, behind: int | None = None, session: str | None = None) -> BlocksStored:
    return BlocksStored(pack(*keys), behind, SIZE, session)


def removed(*keys: int) -> BlocksRemoved:
    return BlocksRemoved(pack(*keys))


def resident(*keys: int) -> BlocksResident:
    return BlocksResident(pack(*keys))


def loaded(*keys: int) -> BlocksLoaded:
    return BlocksLoaded(pack(*keys))


def spilled(*keys: int, tier: int = Tier.WARM) -> BlocksSpilled:
    return BlocksSpilled(pack(*keys), int(tier), 100)


def dropped(*keys: int, tier: int = Tier.WARM, cause: int = 0) -> CopiesDropped:
    return CopiesDropped(pack(*keys), int(tier), int(cause))


def started(
    request: str, *keys: int, found: int = 0, more: int = 0, session: str | None = None,
    **fields: Any,
) -> RequestStarted:  # fmt: skip
    """It begins: the blocks of its prompt, the first ``found`` cached, and ``more`` tokens."""
    tokens = SIZE * len(keys) + more
    return RequestStarted(request, pack(*keys), tokens, SIZE * found, SIZE, session, **fields)


def finished(
    request: str, *keys: int, prompt: int | None = None, more: int = 0, session: str | None = None,
    **fields: Any,
) -> RequestFinished:  # fmt: skip
    """It ends: the blocks of its prompt, the first ``prompt`` or all, and of its answer."""
    read = SIZE * (len(keys) if prompt is None else prompt) + more
    total = SIZE * len(keys) + more
    return RequestFinished(request, pack(*keys), read, total, "stop", session, **fields)


def turn_events(
    session: str | None, *keys: int, found: int = 0, more: int = 0, prompt: int | None = None,
    request: str = "", tenant: str | None = None, segments: Any = (), **said: Any,
) -> list[AnyEvent]:  # fmt: skip
    """A request of the session from its start to its end; ``said`` with its end."""
    name = request or session or f"r{keys}"
    asked = keys if prompt is None else keys[:prompt]
    whose = {"session": session, "tenant": tenant}
    return [
        started(name, *asked, found=found, more=more, segments=segments, **whose),
        stored(*keys),
        finished(name, *keys, prompt=prompt, more=more, **whose, **said),
    ]


class Told:
    """A graph that is told turn by turn and checked after each, and a clock that the test moves."""

    def __init__(self, *first: AnyEvent, now: float = 1000.0, **options: Any) -> None:
        self.now = now
        self.graph = KVCacheGraph(clock=lambda: self.now, **options)
        if first:
            self.tell(*first)

    def tell(self, *events: AnyEvent, engine: str = "e") -> None:
        self.graph.apply(engine, list(events))
        self.graph.check_integrity()

    def turn(self, session: str | None, *keys: int, engine: str = "e", **said: Any) -> None:
        self.tell(*turn_events(session, *keys, **said), engine=engine)

    def order(self, engine: str = "e", limit: int = 1000) -> list[int]:
        return self.graph.rank(engine, limit).order.tolist()
