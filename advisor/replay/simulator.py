"""Replays a trace through simulated engines."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from ...graph.ranking.copies import CopyOrder
from .trace import Ints, ServiceModel, Trace


class EvictionOrder(ABC):
    """An instance's free cached blocks, and the order in which it evicts them. The instance reports
    events in the engine's order; ``take`` and ``freed`` maintain the set.
    """

    def serves(self, capacity: int, copies: int = 0) -> None:  # noqa: B027
        """Note how many blocks the instance has, and how many copies its tier below holds."""

    @abstractmethod
    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        """Note that blocks became free, in this order, tail first; ``request`` used them last."""

    @abstractmethod
    def reused(self, blocks: Sequence[int]) -> None:
        """Note that these free blocks were matched and are in use again."""

    @abstractmethod
    def victims(self, count: int, now: float) -> list[int]:
        """Choose ``count`` free blocks to be evicted now."""

    def started(self, request: int, hit: int, new: Sequence[int], now: float) -> None:  # noqa: B027
        """Note that a request was scheduled: first ``hit`` blocks matched, ``new`` allocated."""

    def evicted(self, blocks: Sequence[int], now: float) -> None:  # noqa: B027
        """Note that the blocks returned by ``victims`` were evicted."""

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:  # noqa: B027
        """Note that the tier below now has copies of ``made``, and no longer of ``gone``."""

    def finished(self, request: int, now: float) -> None:  # noqa: B027
        """Note that a request ended, and that its blocks are about to be freed."""


class LruOrder(EvictionOrder):
    """vLLM's free queue: the block free for longest is evicted first."""

    def __init__(self) -> None:
        self._free: OrderedDict[int, None] = OrderedDict()

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        self._free.update(dict.fromkeys(blocks))

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._free[block]

    def victims(self, count: int, now: float) -> list[int]:
        pop = self._free.popitem
        return [pop(last=False)[0] for _ in range(count)]


# One simulated engine: its block pool, its waiting queue, and the tier below.


@dataclass(frozen=True, slots=True)
class Admission:
    hit: int  # matched by prefix in the engine's pool
    warmed: int  # matched after that in the tier below, and loaded
    new: int  # allocated


class HostTier:
    """Host memory below one or more instances, for copies of evicted blocks.

    Args:
        capacity: Blocks that it holds.
        plain: Drop the least recently used copy first; otherwise as a live engine's tiers do.
    """

    def __init__(self, capacity: int, *, plain: bool = True) -> None:
        self.capacity = capacity
        self._held: CopyOrder[int] = CopyOrder(plain)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def store(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Store copies of evicted blocks, the first of which is dropped first; returns the copies
        that were made, and those that were dropped, perhaps of the same blocks.
        """
        made, gone = [], []
        for block in blocks:
            if block in self._held:
                self._held.leaves(block)
                continue
            self._held.add(block)
            made.append(block)
            if len(self._held) > self.capacity:
                gone.append(next(self._held.first()))
                self._held.discard(gone[-1])
        return made, gone

    def touch(self, blocks: Sequence[int]) -> None:
        """Note that these copies were read, tail first, so that chains lose their tails first here
        too.
        """
        self._held.used(blocks)


class Instance:
    """vLLM's block pool: reference counts, prefix matching, blank blocks first.

    A cached block after a gap in its chain is not matched; it is computed again in its own place
    (vLLM would hold it twice for a while).
    """

    def __init__(
        self, capacity: int, order: EvictionOrder, *, host: HostTier | None = None
    ) -> None:
        self.capacity = capacity
        self.blank = capacity
        self.running = 0
        self._order = order
        order.serves(capacity, 0 if host is None else host.capacity)
        self._host = host
        self._references: dict[int, int] = {}  # cached block → requests that use it
        self._free = 0  # cached blocks that no request uses
        self._unhashed: dict[int, int] = {}  # running request → blocks without a hash

    @property
    def cached(self) -> int:
        """Number of blocks with content that a prompt could match."""
        return len(self._references)

    @property
    def used(self) -> int:
        """Number of blocks that running requests hold."""
        return self.capacity - self.blank - self._free

    def match(self, chain: Sequence[int], limit: int) -> int:
        """Return how many of the first ``limit`` blocks of a chain are cached, from its start."""
        count = 0
        for block in chain[:limit]:
            if block not in self._references:
                break
            count += 1
        return count

    def reach(self, chain: Sequence[int], limit: int) -> int:
        """Return how many of the first ``limit`` blocks are cached, here or in the tier below."""
        count = self.match(chain, limit)
        if self._host is not None:
            while count < limit and (
                chain[count] in self._host or chain[count] in self._references
            ):
                count += 1
        return count

    def admit(
        self, request: int, chain: Sequence[int], limit: int, unhashed: int, now: float
    ) -> Admission | None:
        """Schedule a request; returns None if it must wait for blocks.

        Args:
            chain: Its blocks; all get a place now, and can be matched by the next request.
            limit: How many of them a match may cover.
            unhashed: Blocks for tokens without a hash; returned blank when the request ends.
        """
        hit, known, idle, new = self._sorted_out(chain, limit)
        references = self._references
        need = len(new) + unhashed
        if need > self.blank + self._free - len(idle):
            return None
        warmed = self._warm(chain, hit, limit)
        self._take(idle, known)
        self._order.reused(idle)
        evicted = self._make_room(need, now)
        references.update(dict.fromkeys(new, 1))
        self._unhashed[request] = unhashed
        self.running += 1
        self._order.started(request, hit, new, now)
        if evicted:
            self._order.evicted(evicted, now)
            if self._host is not None:
                self._order.copied(*self._host.store(evicted), now)
        return Admission(hit, warmed, len(new))

    def finish(self, request: int, chain: Sequence[int], now: float) -> None:
        """End a request and free the blocks of its chain that no other request holds, the last
        first.
        """
        self._order.finished(request, now)
        self.blank += self._unhashed.pop(request)
        self.running -= 1
        references = self._references
        if [*map(references.get, chain)].count(1) == len(chain):  # none of it is anybody else's
            references.update(dict.fromkeys(chain, 0))
            freed = list(chain[::-1])
        else:
            freed = []
            for block in reversed(chain):
                references[block] -= 1
                if not references[block]:
                    freed.append(block)
        self._free += len(freed)
        self._order.freed(request, freed, now)

    def _sorted_out(
        self, chain: Sequence[int], limit: int
    ) -> tuple[int, Sequence[int], Sequence[int], Sequence[int]]:
        """How many of the first ``limit`` blocks are matched, and which of all are cached, which of
        these are free, and which are not cached.
        """
        held = [*map(self._references.get, chain)]
        blank = held.count(None)
        match = held.index(None) if blank else len(chain)
        known, new = chain[:match], chain[match:]
        if blank < len(new):  # some are cached behind a gap
            known = [b for b, uses in zip(chain, held, strict=True) if uses is not None]
            new = [b for b, uses in zip(chain, held, strict=True) if uses is None]
        idle = known
        if held.count(0) < len(known):
            idle = [b for b in known if not self._references[b]]
        return min(match, limit), known, idle, new

    def _take(self, idle: Sequence[int], known: Sequence[int]) -> None:
        if len(idle) == len(known):
            self._references.update(dict.fromkeys(known, 1))
        else:
            for block in known:
                self._references[block] += 1
        self._free -= len(idle)

    def _make_room(self, need: int, now: float) -> list[int]:
        """Use blank blocks first, then evict."""
        blank = min(need, self.blank)
        self.blank -= blank
        evicted = self._order.victims(need - blank, now) if need > blank else []
        for block in evicted:
            del self._references[block]
        self._free -= len(evicted)
        return evicted

    def _warm(self, chain: Sequence[int], hit: int, limit: int) -> int:
        if self._host is None:
            return 0
        end = self.reach(chain, limit)
        self._host.touch([b for b in chain[hit:end] if b in self._host])
        return end - hit


Router = Callable[[int, Sequence[Instance]], int]  # ``(request, instances) → instance number``


@dataclass(frozen=True, slots=True)
class Load:
    # Their durations, if the trace is not used or does not state them.
    service: ServiceModel = field(default_factory=ServiceModel)
    max_running: int = 256  # requests that run at once in one instance
    as_recorded: bool = False  # whether durations are taken from the trace


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What each request found, in blocks, and how long it waited."""

    hits: Ints  # int32 ``[requests]``, prompt blocks matched in an engine's pool
    warmed: Ints  # int32 ``[requests]``, prompt blocks loaded from the tier below
    # float64 ``[requests]``, seconds from arrival to being scheduled.
    waited: npt.NDArray[np.float64]
    refused: int  # requests too large for an instance; they hit nothing


def simulate(
    trace: Trace,
    instances: Sequence[Instance],
    *,
    router: Router = lambda request, instances: 0,
    load: Load | None = None,
) -> Outcome:
    """Serve every request of ``trace``; deterministic. Without ``load``, requests run one after the
    other and take no time: the setting for comparing hit rates of policies, since all see the same
    order of events.
    """
    run = _Run(trace, instances, load)
    for request, at in enumerate(trace.at.tolist()):
        run.finish_until(at)
        run.arrive(request, router(request, instances), at)
    run.finish_until(float("inf"))
    return Outcome(run.hits, run.warmed, run.waited, run.refused)


class _Run:
    def __init__(self, trace: Trace, instances: Sequence[Instance], load: Load | None) -> None:
        self.hits = np.zeros(len(trace), dtype=np.int32)
        self.warmed = np.zeros(len(trace), dtype=np.int32)
        self.waited = np.zeros(len(trace))
        self.refused = 0
        self._trace = trace
        self._instances = instances
        self._load = load
        self._chains = trace.chains()
        self._limits = trace.matchable.tolist()
        self._at = trace.at.tolist()
        self._input, self._output = trace.input_tokens.tolist(), trace.output_tokens.tolist()
        self._recorded_s: list[float] = []  # by request; NaN: not known
        if load is not None and load.as_recorded and trace.said is not None:
            self._recorded_s = trace.said.seconds.tolist()
        self._ends: list[tuple[float, int, int]] = []  # (time, request, instance)
        self._waiting: list[deque[int]] = [deque() for _ in instances]

    def arrive(self, request: int, where: int, now: float) -> None:
        if len(self._chains[request]) + self._unhashed(request) > self._instances[where].capacity:
            self.refused += 1
            return
        self._waiting[where].append(request)
        self._schedule(where, now)

    def finish_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            at, request, where = heapq.heappop(self._ends)
            self._instances[where].finish(request, self._chains[request], at)
            self._schedule(where, at)

    def _schedule(self, where: int, now: float) -> None:
        """Admit from the head of the queue, as long as the next request fits."""
        line, instance = self._waiting[where], self._instances[where]
        while line and not (self._load and instance.running >= self._load.max_running):
            request = line[0]
            chain, limit = self._chains[request], self._limits[request]
            admission = instance.admit(request, chain, limit, self._unhashed(request), now)
            if admission is None:
                return
            line.popleft()
            self.hits[request], self.warmed[request] = admission.hit, admission.warmed
            self.waited[request] = now - self._at[request]
            if self._load is None:
                instance.finish(request, chain, now)
            else:
                seconds = self._seconds(request, admission, self._load.service)
                heapq.heappush(self._ends, (now + seconds, request, where))

    def _seconds(self, request: int, admission: Admission, service: ServiceModel) -> float:
        if self._recorded_s and not math.isnan(self._recorded_s[request]):
            return self._recorded_s[request]
        found = (admission.hit + admission.warmed) * self._trace.block_size
        return service.seconds(max(1, self._input[request] - found), self._output[request])

    def _unhashed(self, request: int) -> int:
        """Blocks for output that the trace knows no hashes of, while the request runs."""
        if self._load is None:
            return 0
        tokens = self._input[request] + self._output[request]
        unhashed: int = max(0, -(-tokens // self._trace.block_size) - len(self._chains[request]))
        return unhashed


class RoundRobin:
    """Sends requests to one instance after the other."""

    def __init__(self) -> None:
        self._turn = count()

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        return next(self._turn) % len(instances)


class PrefixAffinity:
    """Sends a request to the instance that caches most of the prompt, including the tier ``below``
    unless all instances share it. Among equals, the one with the fewest running requests is chosen,
    then the one that received the fewest.

    Less than half of a prompt does not count as a match: otherwise every prompt would follow the
    system prompt shared by all to one instance.
    """

    def __init__(self, trace: Trace, below: bool = True) -> None:
        self._chains = trace.chains()
        self._limits = trace.matchable.tolist()
        self._below = below
        self._sent: dict[int, int] = {}

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        chain, limit = self._chains[request], self._limits[request]
        reach = Instance.reach if self._below else Instance.match
        matches = [reach(instance, chain, limit) for instance in instances]
        enough = 2 * max(matches) >= max(1, limit)

        def merit(number: int) -> tuple[int, int, int]:
            instance = instances[number]
            return (matches[number] if enough else 0, -instance.running, -self._sent.get(number, 0))

        best = max(range(len(instances)), key=merit)
        self._sent[best] = self._sent.get(best, 0) + len(chain)
        return best
