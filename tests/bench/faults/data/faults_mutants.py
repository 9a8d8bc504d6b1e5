"""Typed mutants of valid events: decoded, and what still decodes applied to a graph."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from kvgraph.graph.errors import GraphError, WireError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.events import (
    AdviceApplied,
    AnyEvent,
    BlocksAttended,
    BlocksCleared,
    BlocksEmbedded,
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    ConfidenceSampled,
    CopiesDropped,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)

from ...figures import Figures
from ..faults import Say, Size

BATCH: Final = 8
CHECK_EVERY: Final = 20_000  # mutants
_LIMITS: Final = GraphLimits(max_ghosts=2000, max_sessions=200, max_names=100, max_pairs=500)
_KEYS: Final = 400
_NASTY: Final[Sequence[Any]] = (
    0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, -1e308,
    5e-324, float("nan"), float("inf"), -float("inf"), "", "a\0b", "\u202e", "x" * 256, "x" * 257,
    b"", b"\xff" * 8, b"\0" * 7, b"\1" * 16, None, True, False, [], [[]], {}, [1, 2], 9, 10,
)  # fmt: skip


class Mutants:
    """An endless source of events, each a valid one of which something was changed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def batch(self) -> bytes:
        return msgspec.msgpack.encode([[self._mutant() for _ in range(BATCH)]])

    def _mutant(self) -> Any:
        whole = msgspec.to_builtins(self._event(), builtin_types=(bytes,))
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 3))):
            self._change(whole)
        return whole

    def _change(self, fields: list[Any]) -> None:
        rng = self._rng
        if not fields:
            return
        place = rng.randrange(len(fields))
        value = fields[place]
        if isinstance(value, list) and value and rng.random() < 0.7:
            inner = rng.choice(value)
            if isinstance(inner, list):
                self._change(inner)
            return
        how = rng.random()
        if how < 0.5:
            fields[place] = copy.copy(rng.choice(_NASTY))
        elif how < 0.7 and isinstance(value, bytes):
            fields[place] = self._bytes(value)
        elif how < 0.8:
            del fields[place]
        elif how < 0.9:
            fields.insert(place, copy.copy(rng.choice(_NASTY)))
        elif isinstance(value, int):
            changed = value + rng.choice((-1, 1, 16, 2**16, 2**31))
            fields[place] = min(max(changed, -(2**63)), 2**64 - 1)  # what MessagePack can say

    def _bytes(self, value: bytes) -> bytes:
        rng = self._rng
        if rng.random() < 0.3:
            return value + rng.randbytes(rng.randrange(1, 9))
        changed = bytearray(value or b"\0")
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    def _keys(self) -> bytes:
        start = self._rng.randrange(_KEYS)
        count = self._rng.randrange(9)
        return b"".join((1 + (start + i) % _KEYS).to_bytes(8, "little") for i in range(count))

    def _event(self) -> AnyEvent:
        rng, keys = self._rng, self._keys()
        count = len(keys) // 8
        session, tenant = f"s{rng.randrange(300)}", f"t{rng.randrange(150)}"
        request = f"r{rng.randrange(50)}"
        segments = tuple(
            Segment(rng.randrange(10), 0, 16 * rng.randrange(9), rng.random(), session, tenant)
            for _ in range(rng.randrange(4))
        )
        makers: tuple[AnyEvent, ...] = (
            BlocksStored(keys, rng.choice((None, rng.randrange(1, _KEYS))), 16, session),
            BlocksStored(keys, None, 16),
            BlocksRemoved(keys),
            BlocksResident(keys),
            BlocksCleared(),
            RequestStarted(request, keys, 16 * count, 16, 16, session, tenant, segments),
            RequestFinished(request, keys, 16, 16 * count, "stop", session, tenant, True, 3.0),
            SessionSignal(session, tenant, False, 2.0, rng.random() < 0.3),
            BlocksAttended(keys, rng.randbytes(4 * count)),
            ConfidenceSampled(keys, rng.random()),
            BlocksEmbedded(keys, 4, rng.randbytes(8 * count)),
            BlocksSpilled(keys, rng.choice((2, 4)), 1000),
            BlocksLoaded(keys),
            CopiesDropped(keys, rng.choice((2, 4))),
            Pressure(100, 50, 50, 1, 1),
            AdviceApplied(1, 2**40, 3, 4, 5, 6),
            EngineHello(f"e{rng.randrange(3)}", "m", 16, 100, "v"),
        )
        return rng.choice(makers)


def apply_mutants(seed: int, count: int) -> dict[str, int]:
    """Apply ``count`` mutants; how many were refused, unknown and applied, and what went wrong.
    Raises AssertionError: an invariant of the graph does not hold, or it outgrew its limits.
    """
    rng = random.Random(seed)
    mutants, now = Mutants(rng), [0.0]
    graph = KVCacheGraph(limits=_LIMITS, clock=lambda: now[0])
    done = {"mutants": 0, "applied": 0, "refused_batches": 0, "unknown": 0, "crashes": 0}
    while done["mutants"] < count:
        now[0] += rng.choice((0.0, 0.001, 1.0, 1e6 * (rng.random() < 0.001)))
        _apply(graph, mutants.batch(), f"engine-{rng.randrange(3)}", done)
        done["mutants"] += BATCH
        if done["mutants"] % CHECK_EVERY == 0:
            _check(graph)
    _check(graph)
    return done


def _apply(graph: KVCacheGraph, payload: bytes, engine: str, done: dict[str, int]) -> None:
    try:
        message = frames.decode_events([frames.HEADER, bytes(8), payload])
        graph.apply(engine, message.events)
    except (WireError, GraphError):
        done["refused_batches"] += 1
        return
    except Exception:
        done["crashes"] += 1
        raise
    done["applied"] += len(message.events)
    done["unknown"] += message.unknown


def _check(graph: KVCacheGraph) -> None:
    graph.check_integrity()
    tables = graph.tables
    assert len(tables.sessions) <= _LIMITS.max_sessions, "more sessions than allowed"
    assert len(tables.tenants) <= _LIMITS.max_names, "more tenants than allowed"
    for engine in graph.engines:
        ranking = graph.rank(engine, 100)
        assert len(ranking.order) <= 100, "a ranking is longer than asked for"


def run(figures: Figures, size: Size, say: Say) -> None:
    say("a million typed mutants")
    done = apply_mutants(size.seed, 1_000_000)
    figures.add("mutants_applied", done["applied"], "events")
    figures.add("mutants_crashes", done["crashes"], "", "0")
