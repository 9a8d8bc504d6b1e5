"""``EngineRoster``: the engines behind the proxy, which are listed or still answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ..engine_board import EngineBoard, Speed
from .engine_list import FIRST_BYTE_S, Listed
from .health import INTERVAL_S, HealthWatch
from .upstream import Upstream

_log = logging.getLogger(__name__)


class EngineRoster:
    """Adds engines to the board as they are listed, and looks at each for as long as it counts.

    Args:
        board: An engine's number is its place there and in ``upstreams``, for good.
        health: Looks at them.
        speed: Of engines, until it is measured.
        first_byte_s: For which an engine may be silent before the first byte of an answer.

    Attributes:
        upstreams: All that were ever listed.
    """

    def __init__(
        self,
        board: EngineBoard,
        health: HealthWatch,
        speed: Speed | None = None,
        first_byte_s: float = FIRST_BYTE_S,
    ) -> None:
        self.upstreams: list[Upstream] = []
        self._board, self._health = board, health
        self._speed, self._first_byte_s = speed, first_byte_s
        self._listed: set[int] = set()
        self._watched: dict[int, asyncio.Task[None]] = {}
        self._started = False

    @property
    def shown(self) -> list[Upstream]:
        """Engines that are listed, or still answer requests."""
        return [each for each in self.upstreams if self._counts(each)]

    @property
    def watched(self) -> set[int]:
        """Numbers of the engines that are looked at."""
        return set(self._watched)

    @property
    def may_come_back(self) -> bool:
        """Whether an engine that takes no requests now may do so soon."""
        refused, drains = self._health.refused, self._board.draining
        return any(not drains[n] and n not in refused for n in range(len(self._board)))

    def why_none(self) -> str:
        """Why no engine takes requests, in words."""
        listed = [each.number for each in self.shown]
        draining = [each for each in listed if self._board.draining[each]]
        refused = [each for each in listed if each in self._health.refused and each not in draining]
        down = len(listed) - len(draining) - len(refused)
        return (
            f"no engine takes requests: {down} down, {len(draining)} draining, {len(refused)} "
            "refused; GET /fleet says why"
        )

    def list_again(self, engines: Sequence[Listed]) -> None:
        """Take over a list of engines: new ones are added; missing ones get no further requests,
        and are not looked at once they have answered those that they have.

        Raises:
            ConfigError: One of them is no address; nothing has changed.
        """
        known = {upstream.url: upstream.number for upstream in self.upstreams}
        urls = [each.url for each in engines if each.url not in known]
        first = len(self.upstreams)  # all are made before any is added: a bad list changes nothing
        new = [Upstream(at, url, self._first_byte_s) for at, url in enumerate(urls, first)]
        for upstream in new:
            known[upstream.url] = number = self._board.add(upstream.url, self._speed)
            self._board.up[number] = False  # until it says that it is well
            self.upstreams.append(upstream)
        self._board.draining[:] = True
        for each in engines:
            self._board.draining[known[each.url]] = each.drains
        before, self._listed = self._listed, {known[each.url] for each in engines}
        if self._started:
            drains = sum(each.drains for each in engines)
            _log.info(
                "engines are listed again: %d, of which %d are new and %d drain; %d are gone",
                len(engines), len(self._listed - before), drains, len(before - self._listed),
            )  # fmt: skip
            self._watch_listed()

    async def start(self) -> None:
        """Look at all engines once, and then for ever; the first one's models count."""
        await self._health.look(self.upstreams[0])
        await asyncio.gather(*(self._health.look(each) for each in self.upstreams[1:]))
        self._started = True
        self._watch_listed()

    async def close(self) -> None:
        """Stop looking, and close all connections."""
        watching = list(self._watched.values())
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self.upstreams))

    def _watch_listed(self) -> None:
        for each in self.upstreams:
            if each.number in self._listed and each.number not in self._watched:
                self._watched[each.number] = asyncio.create_task(self._watch(each))

    async def _watch(self, upstream: Upstream) -> None:
        """Look at an engine for as long as it counts."""
        while self._counts(upstream):
            try:
                await self._health.look(upstream)
            except Exception:  # ours: the engine stays as it is, and is looked at again
                _log.exception("kvgraph cannot tell how engine %s is", upstream.url)
            await asyncio.sleep(INTERVAL_S)
        self._board.up[upstream.number] = False
        del self._watched[upstream.number]

    def _counts(self, upstream: Upstream) -> bool:
        return upstream.number in self._listed or upstream.asked + upstream.running > 0
