"""``PoolShadows``: what engines still hold of what was sent to them, where nobody says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from .engine_board import Tokens


class Link(NamedTuple):
    """A prompt up to some point: what it is known by, and about how many tokens that is."""

    digest: Hashable
    tokens: int


class PoolShadows:
    """Each engine's prompts as its pool would hold them if it evicts what was unused longest.

    Of a chain, the end goes first. Answers are not counted, nor what engines get from elsewhere.

    Args:
        most: Links that are remembered in all; each engine has an equal part of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: dict[Hashable, int] = {}  # engines by link, one bit each
        self._orders: list[OrderedDict[Hashable, int]] = []  # tokens by link, the longest unused
        self._tokens: list[int] = []  # first; and their sums

    def held(self, links: Sequence[Link], engines: int) -> Tokens:
        """int64 ``[engines]``: tokens of the longest beginning that each holds."""
        tokens = np.zeros(engines, dtype=np.int64)
        missing = (1 << engines) - 1
        for link in reversed(links):
            new = self._holders.get(link.digest, 0) & missing
            missing &= ~new
            while new:
                tokens[(new & -new).bit_length() - 1] = link.tokens
                new &= new - 1
        return tokens

    def sent(self, links: Sequence[Link], engine: int, pool_tokens: int) -> None:
        """Note that a prompt went to an engine; one that its pool does not hold changes nothing.

        Args:
            pool_tokens: That the engine's pool holds; 0: unknown, and it forgets nothing.
        """
        if not links or 0 < pool_tokens < links[-1].tokens:
            return
        while len(self._orders) <= engine:
            self._orders.append(OrderedDict())
            self._tokens.append(0)
        order = self._orders[engine]
        begins = [0, *(link.tokens for link in links[:-1])]
        for link, begin in zip(reversed(links), reversed(begins), strict=True):
            if link.digest in order:
                order.move_to_end(link.digest)
                continue
            order[link.digest] = link.tokens - begin
            self._tokens[engine] += link.tokens - begin
            self._holders[link.digest] = self._holders.get(link.digest, 0) | 1 << engine
        most = self._most // len(self._orders)
        while order and (len(order) > most or 0 < pool_tokens < self._tokens[engine]):
            digest, tokens = order.popitem(last=False)
            self._tokens[engine] -= tokens
            self._drop(digest, engine)

    def forget(self, engine: int) -> None:
        """Forget what an engine got: it has started anew."""
        if engine < len(self._orders):
            for digest in self._orders[engine]:
                self._drop(digest, engine)
            self._orders[engine].clear()
            self._tokens[engine] = 0

    def _drop(self, digest: Hashable, engine: int) -> None:
        left = self._holders.pop(digest) & ~(1 << engine)
        if left:
            self._holders[digest] = left
