"""``PoolShadows``: which of the prompts sent to an engine its pool should still hold, where nobody
says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from .router import Holdings

MOST_LINKS_HELD: Final = 200_000
"""Of all engines together; the longest unused are forgotten first. Chosen: about 50 MB, and 60 MB
for as many that engines lost."""


class Link(NamedTuple):
    """A prompt up to some point: what it is known by, and about how many tokens that is."""

    key: Hashable
    tokens: int


class PoolShadows:
    """What each engine's pool would hold of the prompts that it got, if it evicts what was unused
    longest, and the end of a chain before its beginning: as stock engines do.

    Answers do not count, nor what an engine got from elsewhere.

    Args:
        most: Links that are remembered, of all engines together; and as many that engines lost.
    """

    def __init__(self, most: int = MOST_LINKS_HELD) -> None:
        self._most = most
        self._holders: OrderedDict[Hashable, int] = OrderedDict()  # engines by link, a bit each
        self._lost: OrderedDict[Hashable, int] = OrderedDict()  # the same: who held it and does not
        self._orders: list[OrderedDict[Hashable, int]] = []  # per engine: tokens by link, in order
        self._tokens: list[int] = []  # per engine: their sum

    def __len__(self) -> int:
        """Links that any engine should hold."""
        return len(self._holders)

    def holdings(self, links: Sequence[Link], engines: int) -> Holdings:
        """What each of so many engines should hold of a prompt; ``lost`` marks those that held a
        part of it and evicted it."""
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

    def sent(self, links: Sequence[Link], engine: int, pool_tokens: int) -> None:
        """Note that a prompt went to an engine, which computes it: ``offered`` and ``taken``."""
        self.offered(links, engine, pool_tokens)
        self.taken(engine, pool_tokens)

    def offered(self, links: Sequence[Link], engine: int, pool_tokens: int) -> list[Hashable]:
        """Note that a prompt goes to an engine; a prompt larger than its pool is left out.

        Until it is ``taken`` it displaces nothing.

        Args:
            pool_tokens: What the engine's pool holds; 0: unknown, and nothing is lost there.

        Returns:
            Keys of the links that the engine did not hold, for ``refused``.
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
        """Note that an engine computes what was sent there: what was unused longest leaves.

        Args:
            pool_tokens: As of ``offered``.
        """
        while engine < len(self._orders) and 0 < pool_tokens < self._tokens[engine]:
            key, bit = next(iter(self._orders[engine])), 1 << engine
            self._leaves(key, engine)
            _drop_engine(self._holders, key, bit)
            self._lost[key] = self._lost.pop(key, 0) | bit
        while len(self._lost) > self._most:
            self._lost.popitem(last=False)

    def refused(self, new: Sequence[Hashable], engine: int) -> None:
        """Note that an engine did not take a prompt.

        Args:
            new: What ``offered`` returned.
        """
        for key in new:
            if key in self._orders[engine]:
                self._leaves(key, engine)
                _drop_engine(self._holders, key, 1 << engine)

    def forget(self, engine: int) -> None:
        """Forget what an engine got: it has started anew, or is gone."""
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
    """The numbers of bits that are set."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def _drop_engine(kept: OrderedDict[Hashable, int], key: Hashable, bit: int) -> None:
    """Take an engine's bit from a link; one without any is dropped."""
    if (bits := kept.get(key, 0)) & bit:
        if left := bits & ~bit:
            kept[key] = left
        else:
            del kept[key]
