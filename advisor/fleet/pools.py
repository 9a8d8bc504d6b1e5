"""``PoolShadows``: simulates each engine's pool from the prompts sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from .router import Holdings

MOST_LINKS_HELD: Final = 200_000
"""Links of all engines together; the least recently used are forgotten first. Chosen: about 50 MB,
plus 60 MB for as many links that engines evicted.
"""


class PromptPrefix(NamedTuple):
    """A prefix of a prompt: its digest, and its approximate length in tokens."""

    key: Hashable
    tokens: int


class PoolShadows:
    """Simulates each engine's pool as an LRU cache of the prompts that it received.

    A chain's end is evicted before its beginning, as in stock engines. Answers do not count, nor
    does KV that an engine got from elsewhere.
    """

    def __init__(self, most: int = MOST_LINKS_HELD) -> None:
        self._most = most
        self._holders: OrderedDict[Hashable, int] = OrderedDict()  # engines by link, a bit each
        self._lost: OrderedDict[Hashable, int] = OrderedDict()  # the same: engines that evicted it
        self._orders: list[OrderedDict[Hashable, int]] = []  # per engine: tokens by link, in order
        self._tokens: list[int] = []  # per engine: their sum

    def __len__(self) -> int:
        return len(self._holders)

    def holdings(self, links: Sequence[PromptPrefix], engines: int) -> Holdings:
        """Estimate what each engine holds of a prompt; ``lost``: had a part and evicted it."""
        tokens = np.zeros(engines, dtype=np.int64)
        lost = np.zeros(engines, dtype=np.bool_)
        missing = (1 << engines) - 1
        gone = 0
        for link in reversed(links):
            gone |= self._lost.get(link.key, 0)
            if new := self._holders.get(link.key, 0) & missing:
                missing &= ~new
                tokens[list(_numbers(new))] = link.tokens
        lost[list(_numbers(gone & ((1 << engines) - 1)))] = True
        return Holdings(tokens, tokens, lost=lost)

    def sent(self, links: Sequence[PromptPrefix], engine: int, pool_tokens: int) -> None:
        """Note that an engine computes a prompt: ``offered`` and ``taken`` in one call."""
        self.offered(links, engine, pool_tokens)
        self.taken(engine, pool_tokens)

    def offered(
        self, links: Sequence[PromptPrefix], engine: int, pool_tokens: int
    ) -> list[Hashable]:
        """Add a prompt to an engine's pool, unless it is larger than the pool; nothing is evicted
        for it before ``taken``. Returns the keys of the links that the engine did not hold, for
        ``refused``.
        """
        if not links or 0 < pool_tokens < links[-1].tokens:
            return []
        new: list[Hashable] = []
        while len(self._orders) <= engine:
            self._orders.append(OrderedDict())
            self._tokens.append(0)
        order, holders, lost, bit = self._orders[engine], self._holders, self._lost, 1 << engine
        begins = [0, *(link.tokens for link in links[:-1])]
        for (key, end), begin in zip(reversed(links), reversed(begins), strict=True):
            holders[key] = holders.get(key, 0) | bit
            holders.move_to_end(key)
            if key in order:
                order.move_to_end(key)
                continue
            new.append(key)
            order[key] = end - begin
            self._tokens[engine] += end - begin
            if key in lost:
                _drop_engine(lost, key, bit)
        self._forget_oldest()
        return new

    def taken(self, engine: int, pool_tokens: int) -> None:
        """Evict least recently used links down to the pool's capacity."""
        while engine < len(self._orders) and 0 < pool_tokens < self._tokens[engine]:
            key, bit = next(iter(self._orders[engine])), 1 << engine
            self._leaves(key, engine)
            _drop_engine(self._holders, key, bit)
            self._lost[key] = self._lost.pop(key, 0) | bit
        while len(self._lost) > self._most:
            self._lost.popitem(last=False)

    def refused(self, new: Sequence[Hashable], engine: int) -> None:
        for key in new:
            if key in self._orders[engine]:
                self._leaves(key, engine)
                _drop_engine(self._holders, key, 1 << engine)

    def forget(self, engine: int) -> None:
        """Empty an engine's pool, because the engine was restarted or is gone."""
        if engine < len(self._orders):
            for key in list(self._orders[engine]):
                self._leaves(key, engine)
                _drop_engine(self._holders, key, 1 << engine)
            for key in list(self._lost):
                _drop_engine(self._lost, key, 1 << engine)

    def _leaves(self, key: Hashable, engine: int) -> None:
        self._tokens[engine] -= self._orders[engine].pop(key)

    def _forget_oldest(self) -> None:
        while len(self._holders) > self._most:
            key, engines = self._holders.popitem(last=False)
            for engine in _numbers(engines):
                self._leaves(key, engine)


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def _drop_engine(kept: OrderedDict[Hashable, int], key: Hashable, bit: int) -> None:
    """Clear an engine's bit of a link; drop a link without bits."""
    if (bits := kept.get(key, 0)) & bit:
        if left := bits & ~bit:
            kept[key] = left
        else:
            del kept[key]
