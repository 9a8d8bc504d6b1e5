"""``FakeEngine``: a fake engine for tests, without vLLM, model or GPU. It keeps a paged pool with a
prefix cache, evicts by the sidecar's ranking (or else the least recently used block), and talks
through the real ``AdvisorClient`` over a real socket.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

from ..graph.wire.advice import EvictionRanking
from ..graph.wire.events import (
    AdviceApplied,
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestStarted,
    Segment,
)
from .link.client import AdvisorClient, ClientOptions


class FakeEngine:
    """One engine that serves one request at a time.

    Args:
        endpoint: The sidecar's endpoint.
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        name: The engine's name in its hello.
        options: The client's bounds and periods.
        tokens_per_s: How fast it computes prompts; None: at once.
    """

    def __init__(
        self,
        endpoint: str,
        num_blocks: int = 256,
        block_size: int = 16,
        name: str = "fake:0",
        options: ClientOptions | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        self.tokens_per_s = tokens_per_s
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.name = name
        self.evicted: list[int] = []
        self.client = AdvisorClient(endpoint, self, options)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._applied = 0
        self._stale = 0
        self._requests = 0

    def __enter__(self) -> Self:
        self.client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def cached(self) -> frozenset[int]:
        """Return the keys in the prefix cache."""
        return frozenset(self._cached)

    def run(
        self,
        tokens: Sequence[int],
        session: str | None = None,
        tenant: str | None = None,
        segments: tuple[Segment, ...] = (),
        waiting_for_tool: bool | None = None,
        session_ended: bool = False,
        answer: Sequence[int] = (),
        waited_s: float = 0.0,
        expected_return_s: float | None = None,
    ) -> int:
        """Serve a request of these prompt tokens; returns how many the prefix cache held.

        Args:
            answer: Output tokens, which follow the prompt in the cache.
            waited_s: Seconds for which the request waited before it was scheduled.
            expected_return_s: Seconds until the tool is expected to answer.

        Raises:
            ValueError: Prompt and answer do not fit into the pool.
        """
        keys, request = self.keys([*tokens, *answer]), f"request-{self._requests}"
        if len(keys) > self.num_blocks:
            raise ValueError(f"{len(keys)} blocks do not fit into a pool of {self.num_blocks}")
        self._requests += 1
        hits = self._begin(request, tokens, keys, (session, tenant), segments, waited_s)
        total, why = len(tokens) + len(answer), "finished_stopped"
        known = session, tenant, waiting_for_tool, expected_return_s, session_ended
        self.client.emit(RequestFinished(request, _pack(keys), len(tokens), total, why, *known))
        return hits * self.block_size

    def reset(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()
        self.client.emit(BlocksCleared())

    def keys(self, tokens: Sequence[int]) -> list[int]:
        """Return the keys of a prompt's full blocks: each hash covers its whole prefix."""
        keys, parent = [], b""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = struct.pack(f"<{self.block_size}q", *tokens[end - self.block_size : end])
            parent = hashlib.blake2b(parent + block, digest_size=8).digest()
            keys.append(int.from_bytes(parent, "little"))
        return keys

    def _begin(
        self, request: str, tokens: Sequence[int], keys: list[int],
        who: tuple[str | None, str | None], segments: tuple[Segment, ...], waited_s: float,
    ) -> int:  # fmt: skip
        """Compute the blocks of a prompt that are not cached; returns how many were."""
        asked, size = len(tokens) // self.block_size, self.block_size
        hits = next((i for i, key in enumerate(keys[:asked]) if key not in self._cached), asked)
        prompt = _pack(keys[:asked]), len(tokens), hits * size, size
        self.client.emit(RequestStarted(request, *prompt, *who, segments, waited_s=waited_s))
        if self.tokens_per_s is not None:
            time.sleep((len(tokens) - hits * size) / self.tokens_per_s)
        self._store(keys, hits, who[0] if who[1] is None else None)  # a name is its tenant's
        return hits

    # Memory -------------------------------------------------------------------------------------

    def _store(self, keys: list[int], hits: int, session: str | None) -> None:
        new = keys[hits:]
        room = self.num_blocks - len(self._cached)
        self._evict(len(new) - room, keep=frozenset(keys))
        self._cached.update(dict.fromkeys(new))
        for key in reversed(keys):  # freed tail first, so that a chain's head goes last
            self._cached.move_to_end(key)
        if new:
            parent = keys[hits - 1] if hits else None
            self.client.emit(BlocksStored(_pack(new), parent, self.block_size, session))

    def _evict(self, n: int, keep: frozenset[int]) -> None:
        if n <= 0:
            return
        ranking = self.client.ranking()
        self._stale += ranking is None
        candidates = self._in_order(ranking)
        victims = [key for key in candidates if key in self._cached and key not in keep][:n]
        for key in victims:
            del self._cached[key]
        self._applied = self._applied if ranking is None else ranking.epoch
        self.evicted += victims
        self.client.emit(BlocksRemoved(_pack(victims)))

    def _in_order(self, ranking: EvictionRanking | None) -> dict[int, None]:
        """Yield evictable blocks: ranked ones, then the longest unused, then protected ones."""
        if ranking is None:
            return dict.fromkeys(self._cached)
        kept = ranking.protected.tolist()
        last = set(kept)
        longest_unused = (key for key in self._cached if key not in last)
        return dict.fromkeys([*ranking.order.tolist(), *longest_unused, *kept])

    # EngineEnd ----------------------------------------------------------------------------------

    def hello(self) -> EngineHello:
        return EngineHello(self.name, "fake-model", self.block_size, self.num_blocks, "fake 0")

    def resident(self) -> bytes:
        return _pack(list(self._cached))

    def copies(self) -> list[AnyEvent]:
        return []

    def held(self) -> list[AnyEvent]:
        return []

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        cached = len(self._cached)
        speed = self.tokens_per_s or 0.0
        pressure = Pressure(self.num_blocks, self.num_blocks, cached, 0, 0, speed)
        evicted = len(self.evicted)
        return [pressure, AdviceApplied(self._applied, evicted, 0, self._stale, 0, dropped)]


def _pack(keys: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)
