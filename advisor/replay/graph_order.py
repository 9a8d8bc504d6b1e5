"""``GraphOrder``: the eviction order of a simulated engine that a real graph advises."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.formulas import LruPolicy
from ...graph.ranking.policy import Policy, Rules
from ...graph.tables.tables import GraphLimits
from ...graph.types import Authority, Keys, Tier
from ...graph.wire.advice import PRESSING_SHARE, AdmissionAdvice, EvictionRanking
from ...graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    EngineHello,
    RequestFinished,
    RequestStarted,
    Segment,
    TierReport,
)
from ..admission import Admission
from ..policies.guard import Guard
from .simulator import EvictionOrder
from .trace import BYTES_PER_TOKEN, Ints, Trace


class TraceEvents:
    """Makes the events of a trace.

    Args:
        hints: Whether callers name their sessions and state what the trace knows. If the trace has
            no such statements, they state which request is their session's last.
        layers: Whether the engine finds the parts of each prompt itself; replaces callers'
            statements.
        stops: Whether the engine recognises from each answer why it ended; replaces callers'
            statements.
    """

    def __init__(
        self, trace: Trace, hints: bool, layers: bool = False, stops: bool = False
    ) -> None:
        self.keys = trace.keys()
        self._trace = trace
        self._named = hints and trace.has_sessions
        self._said = trace.said if hints and trace.said and trace.said.anything else None
        self._knows_last = hints and self._said is None
        self._read = trace.said if layers and self._said is None else None
        self._ends = self._said or (trace.said if stops else None)

    def started(self, request: int, hit: int) -> RequestStarted:
        trace = self._trace
        chain = trace.chain(request)
        return RequestStarted(
            request_id=str(request),
            hashes=self._packed(chain[: int(trace.prompts[request])]),
            prompt_tokens=int(trace.input_tokens[request]),
            cached_tokens=hit * trace.block_size,
            block_size=trace.block_size,
            session=self._session(request),
            tenant=self._tenant(request),
            segments=self._segments(request),
        )

    def stored(self, request: int, hit: int) -> BlocksStored:
        chain = self._trace.chain(request)
        parent = int(self.keys[chain[hit - 1]]) if hit else None
        return BlocksStored(self._packed(chain[hit:]), parent, self._trace.block_size)

    def removed(self, blocks: Sequence[int]) -> BlocksRemoved:
        return BlocksRemoved(self.keys[list(blocks)].tobytes())

    def copied(self, blocks: Sequence[int]) -> BlocksSpilled:
        size = BYTES_PER_TOKEN * self._trace.block_size
        return BlocksSpilled(self.keys[list(blocks)].tobytes(), Tier.WARM, size)

    def dropped(self, blocks: Sequence[int]) -> CopiesDropped:
        return CopiesDropped(self.keys[list(blocks)].tobytes(), Tier.WARM)

    def finished(self, request: int, now: float) -> RequestFinished:
        trace = self._trace
        prompts, tokens = int(trace.prompts[request]), int(trace.input_tokens[request])
        # A partial block has no hash that a longer prompt could extend.
        known = trace.chain(request)
        whole = np.concatenate([known[: int(trace.full[request])], known[prompts:]])
        return RequestFinished(
            request_id=str(request),
            hashes=self._packed(whole),
            prompt_tokens=tokens,
            total_tokens=tokens + int(trace.output_tokens[request]),
            reason="finished",
            session=self._session(request),
            tenant=self._tenant(request),
            waiting_for_tool=self._waiting(request),
            expected_return_s=self._expected_return_s(request, now),
            session_ended=self._ended(request),
        )

    def _session(self, request: int) -> str | None:
        return f"s{self._trace.session[request]}" if self._named else None

    def _tenant(self, request: int) -> str | None:
        if self._said is None or self._said.tenant[request] < 0:
            return None
        return f"t{self._said.tenant[request]}"

    def _segments(self, request: int) -> tuple[Segment, ...]:
        said = self._said or self._read
        if said is None:
            return ()
        authority = int(Authority.INFERRED if self._said is None else Authority.CALLER)
        return tuple(
            Segment(int(layer), start, end, authority=authority)
            for layer, start, end in said.layers[request]
        )

    def _ended(self, request: int) -> bool:
        if self._said is not None:
            return bool(self._said.ended[request])
        return self._knows_last and bool(self._trace.last[request])

    def _waiting(self, request: int) -> bool | None:
        if self._ends is None or self._ends.waiting[request] < 0:
            return None
        return bool(self._ends.waiting[request])

    def _expected_return_s(self, request: int, now: float) -> float | None:
        """Return the pause from ``now``, or from the recorded end where requests take no time."""
        if self._said is None or np.isnan(told := self._said.expected_return_s[request]):
            return None
        took = np.nan_to_num(self._said.seconds[request])
        return float(told + max(0.0, self._trace.at[request] + took - now))

    def _packed(self, blocks: Ints) -> bytes:
        return self.keys[blocks].tobytes()


class EngineUpdate(NamedTuple):
    """An event of an engine or, without an event, the eviction of blocks."""

    at: float  # seconds of the trace
    event: AnyEvent | None
    blocks: Sequence[int] = ()  # blocks that became resident by the event, or were evicted


class SimulatedSidecar:
    """A real graph with a simulated clock, which receives events as late as a live one would.

    Engines that share it are one fleet: a session that moves is recognised on its new engine, and
    evidence from one engine counts for all.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,  # fresh, since it may learn
        *,
        rules: Rules | None = None,  # None takes the defaults
        # whether callers name their sessions and state what the trace knows; if the trace has no
        # such statements, they state which turns are their sessions' last
        hints: bool = False,
        layers: bool = False,  # whether the engines find the parts of each prompt themselves
        stops: bool = False,  # whether they read off each answer why it ended
        guard: bool = True,  # whether LRU ranks until the policy has shown that it finds more
    ) -> None:
        self.now = 0.0  # the graph's clock, in seconds of the trace
        self.events = TraceEvents(trace, hints, layers, stops)
        self.graph = KVCacheGraph(
            policy=policy,
            rules=rules,
            referee=Guard(policy.name, yields=guard and policy.name != LruPolicy.name),
            limits=GraphLimits(logs=False),
            clock=lambda: self.now,
        )
        self._block_size = trace.block_size
        self._pending: dict[str, deque[EngineUpdate]] = {}  # by engine, not received yet

    def join(self, capacity: int, copies: int = 0) -> str:
        engine = f"replay {len(self._pending)}"
        self._pending[engine] = deque()
        hello = EngineHello(engine, "", self._block_size, capacity + 1, "")
        self.graph.apply(engine, [hello, *([_memory(copies)] if copies else [])])
        return engine

    def happened(self, engine: str, news: EngineUpdate) -> None:
        """Queue an event; the graph receives it later."""
        self._pending[engine].append(news)

    def rank(self, engine: str, limit: int, now: float) -> EvictionRanking:
        """Rank an engine's blocks by the events received so far."""
        self.now = now
        return self.graph.rank(engine, limit, for_copies=False)

    def hear(self, engine: str, before: float, others_before: float) -> None:
        """Apply all events of an engine before a time, and of the others before ``others_before``.
        Changes of residency in between are applied last, in one run: a ranking sees the same
        columns, and the graph applies a run at once.
        """
        stored: dict[str, list[AnyEvent]] = {}
        changed: dict[str, dict[int, bool]] = {}
        while (heard := self._next_due(engine, before, others_before)) is not None:
            queue, turns = self._pending[heard], list[AnyEvent]()
            self.now = queue[0].at
            while queue and queue[0].at == self.now:
                news = queue.popleft()
                if isinstance(news.event, BlocksStored):
                    stored.setdefault(heard, []).append(news.event)
                elif news.event is not None:
                    turns.append(news.event)
                resident = news.event is not None
                changed.setdefault(heard, {}).update(dict.fromkeys(news.blocks, resident))
            self.graph.apply(heard, turns)
        for heard, blocks in changed.items():
            churn = stored.get(heard, [])
            if removed := [block for block, resident in blocks.items() if not resident]:
                churn.append(self.events.removed(removed))
            self.graph.apply(heard, churn)

    def _next_due(self, engine: str, before: float, others_before: float) -> str | None:
        """Return the engine with the oldest event that may be applied."""
        first, oldest = None, before
        for heard, queue in self._pending.items():
            until = before if heard == engine else others_before
            if queue and queue[0].at < min(until, oldest):
                first, oldest = heard, queue[0].at
        return first


def _memory(copies: int) -> TierReport:
    """A report of an empty host memory for so many copies."""
    counts: dict[str, Any] = dict.fromkeys(TierReport.__struct_fields__, 0)
    return TierReport(**{**counts, "warm_capacity": copies, "reads_store": False})


_SLICE: Final = 128  # keys looked up at a time; chosen
_DELAY_S: Final = 0.2  # until a sidecar receives an event: engines report five times per second
_MAX_RANKED: Final = 8192  # blocks per ranking; after them an engine's own order applies


@dataclass(frozen=True, slots=True)
class Planning:
    """The timing of a live sidecar's rankings."""

    interval_s: float = 0.5  # seconds between two rankings
    # Seconds until an engine that stored much (``PRESSING_SHARE``) has reported it.
    pressing_delay_s: float = 0.02


class GraphOrder(EvictionOrder):
    """Reports to a sidecar as an engine's hook would, and evicts by its rankings.

    A ranking is made at every multiple of the interval from earlier events, as live; rankings that
    no eviction needs are left out, which changes no result. After a ranking's end the engine's own
    order applies: the longest free block first.
    """

    def __init__(self, sidecar: SimulatedSidecar, planning: Planning | None = None) -> None:
        self.planning = planning or Planning()
        self.sidecar = sidecar
        self._engine = ""
        self._free: OrderedDict[int, float] = OrderedDict()
        self._ranking: Keys = sidecar.events.keys[:0]  # what is left of it
        self._protected: set[int] = set()  # block ids
        self._slice: list[int] = []  # its next block ids, evict last → evict first
        self._tick = self._known_of = -math.inf
        self._stored = 0  # blocks since the last ranking
        self._pressing = 1
        self._word: AdmissionAdvice | None = None
        self._ids_by_key = np.argsort(sidecar.events.keys, kind="stable")
        self._sorted_keys = sidecar.events.keys[self._ids_by_key]

    @classmethod
    def alone(cls, trace: Trace, policy: Policy, *, hints: bool = False) -> GraphOrder:
        """Return the order of an engine with a sidecar of its own, with its defaults."""
        return cls(SimulatedSidecar(trace, policy, hints=hints))

    def serves(self, capacity: int, copies: int = 0) -> None:
        self._engine = self.sidecar.join(capacity, copies)
        self._pressing = max(1, int(PRESSING_SHARE * capacity))

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        self._free.update(dict.fromkeys(blocks, now))

    def reused(self, blocks: Sequence[int]) -> None:
        deque(map(self._free.__delitem__, blocks), maxlen=0)

    def victims(self, count: int, now: float) -> list[int]:
        self._refresh(now)
        taken: list[int] = []
        free, known_of = self._free, self._known_of
        while len(taken) < count and self._look_ahead():
            ranked = self._slice
            while ranked and len(taken) < count:
                block = ranked.pop()
                # What was used since the ranking's moment is not in it.
                if free.get(block, math.inf) <= known_of:
                    del free[block]
                    taken.append(block)
        taken.extend(self._longest_free() for _ in range(count - len(taken)))
        return taken

    def started(self, request: int, hit: int, new: Sequence[int], now: float) -> None:
        self._tell(now, self.sidecar.events.started(request, hit))
        self._stored += len(new)
        if new:
            self._tell(now, self.sidecar.events.stored(request, hit), new)

    def evicted(self, blocks: Sequence[int], now: float) -> None:
        self._tell(now, None, blocks)

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:
        if made:
            self._tell(now, self.sidecar.events.copied(made))
        if gone:
            self._tell(now, self.sidecar.events.dropped(gone))

    def finished(self, request: int, now: float) -> None:
        self._tell(now, self.sidecar.events.finished(request, now))

    def advised(self, admission: Admission, now: float) -> AdmissionAdvice:
        """Return advice on admission as of ``now``, renewed at every multiple of the interval."""
        tick = math.floor(now / self.planning.interval_s) * self.planning.interval_s
        if self._word is None or tick > self._word.ts:
            known_of = tick - _DELAY_S
            self.sidecar.hear(self._engine, known_of, known_of)
            self.sidecar.now = tick
            tables = self.sidecar.graph.tables
            word = admission.advise(tables, tables.engines[self._engine], tick)
            self._word = replace(word, known_of=known_of)
        return self._word

    def _longest_free(self) -> int:
        """Take the longest free block that is not protected, or else the longest free one."""
        for _ in range(len(self._protected)):
            block = next(iter(self._free))
            if block not in self._protected:
                break
            self._free.move_to_end(block)
        return self._free.popitem(last=False)[0]

    def _look_ahead(self) -> bool:
        """Look the ranking's next keys up, one slice at a time; False at its end."""
        if not self._slice:
            self._slice = self._ids(self._ranking[:_SLICE])[::-1]
            self._ranking = self._ranking[_SLICE:]
        return bool(self._slice)

    def _refresh(self, now: float) -> None:
        """Rank as of the last tick, once, or as of now if much was stored since."""
        tick = math.floor(now / self.planning.interval_s) * self.planning.interval_s
        if self._stored >= self._pressing:
            self._rank(now, now - self.planning.pressing_delay_s)
        elif tick > self._tick:
            self._rank(tick, tick - _DELAY_S)

    def _rank(self, tick: float, known_of: float) -> None:
        self._tick, self._known_of, self._stored = tick, known_of, 0
        self.sidecar.hear(self._engine, known_of, min(known_of, tick - _DELAY_S))
        ranking = self.sidecar.rank(self._engine, _MAX_RANKED, tick)
        self._ranking, self._protected = ranking.order, set(self._ids(ranking.protected))
        self._slice = []

    def _ids(self, keys: Keys) -> list[int]:
        found: list[int] = self._ids_by_key[np.searchsorted(self._sorted_keys, keys)].tolist()
        return found

    def _tell(self, now: float, event: AnyEvent | None, blocks: Sequence[int] = ()) -> None:
        self.sidecar.happened(self._engine, EngineUpdate(now, event, blocks))
