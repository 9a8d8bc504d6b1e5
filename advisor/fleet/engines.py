"""The engines behind the proxy: listed (``EngineRoster``), and up (``HealthWatch``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import orjson
from prometheus_client.parser import text_string_to_metric_families

from ..process.process import RateLimitedLog
from .board import EngineBoard
from .upstream import (
    FIRST_BYTE_S,
    EngineAddress,
    NothingAnsweredError,
    OwnAnswer,
    SilentError,
    Upstream,
    engine_in,
)

_CACHE: Final = "vllm:cache_config_info"
_STATED: Final = "kv_cache_size_tokens"  # vLLM's own name for it
_LONGEST_NAME: Final = 40  # characters; chosen
_LONGEST_LINE: Final = 400  # characters of an engine's text shown in the log; chosen
_MOST: Final = 1 << 53  # tokens; chosen: beyond any pool


class CacheFacts(NamedTuple):
    tokens: int = 0  # capacity of its pool over all ranks; 0 if not reported
    hashing: str = ""  # block size and hash algorithm as text; empty if not reported


def cache_facts(exposition: str) -> CacheFacts:
    """Parse the KV cache's size and hashing from an engine's ``/metrics``."""
    lines = [line for line in exposition.splitlines() if line.startswith(_CACHE + "{")]
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
        ranks = [sample.labels for family in families for sample in family.samples]
        tokens = sum(map(_tokens, ranks))
    except Exception:  # the parser raises other errors too, such as IndexError
        return CacheFacts()
    if not ranks or not 0 <= tokens <= _MOST:
        return CacheFacts()
    return CacheFacts(tokens, _hashing(ranks[0]))


def _hashing(rank: dict[str, str]) -> str:
    """Describe how a rank hashes blocks; empty where it states no block size."""
    algorithm = rank.get("prefix_caching_hash_algo", "")[:_LONGEST_NAME]
    try:
        size = f"blocks of {int(rank['block_size'])} tokens"
    except (ValueError, KeyError):
        return ""
    return size + f", {algorithm}" * bool(algorithm)


def _tokens(rank: dict[str, str]) -> int:
    """Return the tokens of a rank's pool; raises KeyError or ValueError if they are not stated."""
    # With several KV cache groups a request takes blocks of each, and the product is wrong.
    with contextlib.suppress(ValueError, OverflowError):
        if 0 < (stated := int(float(rank.get(_STATED, "")))) <= _MOST:
            return stated
    return int(rank["num_gpu_blocks"]) * int(rank["block_size"])


INTERVAL_S: Final = 0.5
"""Seconds between two health checks; chosen: a failure that no request notices is known within a
second.
"""
TIMEOUT_S: Final = 2.0  # seconds for an answer; chosen
_LATE_S: Final = 0.25  # a timeout that fires later than this: this process was busy; chosen
SLOW: Final = 3
"""Consecutive health checks that may time out before an engine is down: a busy one is slow.
Chosen.
"""
_LONGEST_DOUBT_S: Final = 30.0  # chosen: about as long as an engine takes to restart
REPLACED_S: Final = 60.0
"""Seconds without any engine of the known models after which others may replace them; chosen:
longer than any time of doubt.
"""
AT_FAULT: Final = 2
"""Consecutive requests, dropped by an engine and answered by another, after which it is at fault,
whatever its health check says; a refused one counts too. Chosen, as for errors.
"""
_OK: Final = 200
NEEDS_KEY: Final = frozenset({401, 403})

_log = logging.getLogger(__name__)


class HashingWatch:
    def __init__(self, board: EngineBoard) -> None:
        self._board = board
        self._first = ""
        self._differs: dict[int, str] = {}

    def differs(self, number: int) -> str | None:
        return self._differs.get(number)

    def compare(self, upstream: Upstream, hashing: str) -> None:
        """Compare an engine's hashing with the first engine's, and log a difference."""
        number, hashing = upstream.number, _one_line(hashing)
        if not self._first or not self._board.up.any():
            self._first = hashing
        if not hashing or hashing == self._first:
            self._differs.pop(number, None)
            return
        said = f"{hashing}, the others {self._first}: they find nothing of each other's in a store"
        if self._differs.get(number) != said:
            _log.warning("engine %s has %s", upstream.url, said)
        self._differs[number] = said


class HealthWatch:
    """Checks engines and marks them up or down on the board.

    An engine goes down when it refuses a connection, leaves ``SLOW`` health checks unanswered, or
    drops a request and fails an immediate health check. If the check succeeds, the request itself
    may cause engines to drop it, and must not take them all down: then the engine goes down only if
    another engine answered that request, ``AT_FAULT`` times in a row.

    An engine that is down gets no new requests. Its running ones are given up at once if its port
    refuses connections, and otherwise only if it hangs (see ``Upstream``): a slow engine, or one
    that broke a single answer, may still finish them. It comes up again when its health is good, it
    serves the same models as the others, and a time of doubt has passed, which doubles each time it
    went down for requests that it dropped.

    The fleet's models are those of the first engine that answered. Other models replace them if no
    engine is up, and all that answered last serve others or ``REPLACED_S`` have passed. Models
    behind an API key are unknown and not compared.

    Engines that hash blocks differently get requests too, since the proxy counts tokens per engine;
    they are named in the log because they cannot share a store.
    """

    def __init__(
        self,
        board: EngineBoard,
        # called with an engine that was down and is up
        came_back: Callable[[Upstream], None] = lambda upstream: None,
        # returns an engine's hashing as its sidecar states it, by number; "": unknown
        hashing: Callable[[int], str] = lambda number: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._came_back = came_back
        self._hashing = hashing
        self._clock = clock
        self._unanswered: dict[int, int] = {}
        self._doubt_s: dict[int, float] = {}
        self._not_before: dict[int, float] = {}
        self._up_since: dict[int, float] = {}
        self._looks: dict[int, asyncio.Task[None]] = {}  # at engines that dropped a request
        self._said = RateLimitedLog(_log, clock)  # what callers can bring about at will
        self._models: list[str] | None = None
        self._serves: dict[int, list[str]] = {}  # by an engine's number: what it said last
        self._last_up = clock()
        self.refused: dict[int, str] = {}  # by number, why a healthy engine gets no requests
        self.why: dict[int, str] = {}  # by number, why an engine is down
        self.keyed: set[int] = set()  # numbers of engines that want an API key
        # ``by_metrics``, ``by_sidecars``: hashing compared by each source; metrics do not tell the
        # seed; sidecars do.
        self.by_metrics, self.by_sidecars = HashingWatch(board), HashingWatch(board)

    async def check(self, upstream: Upstream) -> None:
        number, wrong = upstream.number, await self._what_is_wrong(upstream)
        if wrong is None:
            return
        if wrong:
            self._down(upstream, wrong)
            return
        self.by_sidecars.compare(upstream, self._hashing(number))
        if self._board.up.any():
            self._last_up = self._clock()
        if not self._board.up[number] and self._clock() >= self._not_before.get(number, 0.0):
            await self._admit(upstream)

    async def _what_is_wrong(self, upstream: Upstream) -> str | None:
        """Return what is wrong with an engine; "": nothing; None: unknown, as it or we are busy."""
        number, until = upstream.number, self._clock() + TIMEOUT_S
        try:
            status = (await upstream.ask("/health", TIMEOUT_S)).status
        except SilentError:
            if self._clock() - until > _LATE_S:
                return None  # this process was busy, and did not hear what was said
            self._unanswered[number] = self._unanswered.get(number, 0) + 1
            upstream.is_silent = self._unanswered[number] >= SLOW
            return f"no answer to {SLOW} questions after its health" if upstream.is_silent else None
        except NothingAnsweredError as error:
            if error.refused:
                upstream.drop_unanswered()
            return None if error.ours else str(error)
        self._unanswered[number], upstream.is_silent = 0, False
        return "" if status == _OK else "it says that it is not well"

    def look_at(self, upstream: Upstream, why: str) -> asyncio.Task[None]:
        """Check at once an engine that dropped a request; done when the result is known."""
        number = upstream.number
        if (look := self._looks.get(number)) is None:  # one for all that are dropped meanwhile
            look = self._looks[number] = asyncio.create_task(self._look(upstream, why))
            look.add_done_callback(lambda _: self._looks.pop(number, None))
        return look

    async def _look(self, upstream: Upstream, why: str) -> None:
        try:
            wrong = await self._what_is_wrong(upstream)
        except Exception:  # ours: the engine stays as it is, and is looked at again
            _log.exception("kvgraph cannot tell how engine %s is", upstream.url)
            return
        if wrong:
            self.dropped(upstream, f"{why}; {wrong}")
            return
        seems = "is well" if wrong == "" else "is slow to say how it is"
        self._said.warn(
            "drops", "engine %s dropped a request, and %s: %s", upstream.url, seems, why
        )

    def outdone(self, upstream: Upstream, dropped_at: float) -> None:
        """Note that another engine answered a request that this one dropped at ``dropped_at``."""
        number, board = upstream.number, self._board
        if not board.up[number] or dropped_at < self._up_since.get(number, dropped_at):
            return  # it was down for that already
        board.note_answer(number, refused=True)
        if board.refusing[number] >= AT_FAULT:
            self.dropped(upstream, "it drops requests that others answer")

    def dropped(self, upstream: Upstream, why: str) -> None:
        """Mark an engine as unreliable: it is down for a while, whatever its health check says."""
        number = upstream.number
        doubt = self._doubt_s.get(number, INTERVAL_S / 2)
        if self._board.up[number]:  # one death drops many requests, and is doubted once
            doubt = self._doubt_s[number] = min(_LONGEST_DOUBT_S, 2 * doubt)
        self._not_before[number] = self._clock() + doubt
        self._down(upstream, why)

    def served(self, upstream: Upstream) -> None:
        """Note that an engine completed a request, which makes it reliable again."""
        self._doubt_s.pop(upstream.number, None)

    def differs(self, number: int) -> str | None:
        return self.by_metrics.differs(number) or self.by_sidecars.differs(number)

    def _down(self, upstream: Upstream, why: str) -> None:
        before, self.why[upstream.number] = self.why.get(upstream.number), why
        if self._board.up[upstream.number]:
            self._board.up[upstream.number] = False
            _log.warning("engine %s is down: %s", upstream.url, why)
        elif before is None:
            _log.info("engine %s is not up yet: %s", upstream.url, why)

    async def _admit(self, upstream: Upstream) -> None:
        number = upstream.number
        try:
            answer = await upstream.ask("/v1/models", TIMEOUT_S)
        except NothingAnsweredError:
            return
        (self.keyed.add if answer.status in NEEDS_KEY else self.keyed.discard)(number)
        if number not in self.keyed and not self._serves_the_same(upstream, answer):
            return
        self.refused.pop(number, None)
        facts = await _facts(upstream)
        if self._clock() < self._not_before.get(number, 0.0):
            return  # it dropped a request meanwhile
        self._board.pool[number] = facts.tokens
        self.by_metrics.compare(upstream, facts.hashing)
        self._board.up[number], self._up_since[number] = True, self._clock()
        self.why.pop(number, None)
        self._came_back(upstream)
        key = ", and wants an API key" if number in self.keyed else ""
        _log.info("engine %s is up%s", upstream.url, key)

    def _serves_the_same(self, upstream: Upstream, answer: OwnAnswer) -> bool:
        """Compare an engine's models with the fleet's; refuse it where they differ."""
        number, models = upstream.number, _models(answer)
        if models is not None:
            self._serves[number] = models
            if self._models is None or self._are_replaced():
                self._models = models
        if models is not None and models == self._models:
            return True
        said = f"serves {_named(models)}, the others {_named(self._models)}: no request goes there"
        if self.refused.get(number) != said:
            _log.error("engine %s %s", upstream.url, said)
        self.refused[number] = said
        return False

    def _are_replaced(self) -> bool:
        """Tell whether the fleet's models are served by nobody any more."""
        board = self._board
        if board.up.any():
            return False
        known = [models for each, models in self._serves.items() if not board.draining[each]]
        return self._models not in known or self._clock() - self._last_up > REPLACED_S


async def _facts(upstream: Upstream) -> CacheFacts:
    try:
        answer = await upstream.ask("/metrics", TIMEOUT_S)
    except NothingAnsweredError:
        return CacheFacts()
    return cache_facts(answer.content.decode(errors="replace"))


def _models(answer: OwnAnswer) -> list[str] | None:
    """Return the models that an engine lists, with their context lengths; None without any."""
    if answer.status != _OK:
        return None
    with contextlib.suppress(
        orjson.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError
    ):
        models = orjson.loads(answer.content)["data"]
        own = [each for each in models if not each.get("parent")]  # an adapter has one
        return sorted(map(_model, own)) or None
    return None


def _model(told: dict[str, Any]) -> str:
    longest = told.get("max_model_len")
    return str(told["id"]) + ("" if longest is None else f" ({longest} tokens)")


def _named(models: list[str] | None) -> str:
    return "nothing that it lists" if models is None else _one_line(", ".join(models))


def _one_line(text: str) -> str:
    """Escape a text for the log: whoever answers at an engine's or a sidecar's address chose it."""
    return ascii(text[:_LONGEST_LINE])[1:-1][:_LONGEST_LINE]


class EngineRoster:
    """Adds listed engines to the board, and watches them until they are removed and drained."""

    def __init__(
        self,
        board: EngineBoard,  # an engine's number is its index there and in `upstreams`
        health: HealthWatch,
        # seconds for which an engine may be silent before an answer's first byte
        first_byte_s: float = FIRST_BYTE_S,
    ) -> None:
        self.upstreams: list[Upstream] = []  # all engines that were ever listed
        self._board, self._health = board, health
        self._first_byte_s = first_byte_s
        self._listed: set[int] = set()
        self._watched: dict[int, asyncio.Task[None]] = {}
        self._started = False

    @property
    def shown(self) -> list[Upstream]:
        return [each for each in self.upstreams if self._counts(each)]

    @property
    def watched(self) -> set[int]:
        return set(self._watched)

    @property
    def may_come_back(self) -> bool:
        refused, drains = self._health.refused, self._board.draining
        return any(not drains[n] and n not in refused for n in range(len(self._board)))

    def why_none(self) -> str:
        listed = [each.number for each in self.shown]
        draining = [each for each in listed if self._board.draining[each]]
        refused = [each for each in listed if each in self._health.refused and each not in draining]
        down = len(listed) - len(draining) - len(refused)
        return (
            f"no engine takes requests: {down} down, {len(draining)} draining, {len(refused)} "
            "refused; GET /fleet says why"
        )

    def list_again(self, engines: Sequence[EngineAddress]) -> None:
        """Replace the list of engines: new ones join, missing ones drain. Raises ConfigError."""
        known = {upstream.url: upstream.number for upstream in self.upstreams}
        # All are read before any is added: a bad list changes nothing.
        urls = [engine_in(each.url).url for each in engines if each.url not in known]
        first = len(self.upstreams)
        new = [Upstream(at, url, self._first_byte_s) for at, url in enumerate(urls, first)]
        for upstream in new:
            known[upstream.url] = number = self._board.add(upstream.url)
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
                len(engines),
                len(self._listed - before),
                drains,
                len(before - self._listed),
            )
            self._watch_listed()

    async def start(self) -> None:
        """Check all engines once, then periodically; the first one's models become the fleet's."""
        await self._check(self.upstreams[0])
        await asyncio.gather(*(self._check(each) for each in self.upstreams[1:]))
        self._started = True
        self._watch_listed()

    async def close(self) -> None:
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
        """Check an engine until it is unlisted and has answered what it has."""
        while self._counts(upstream):
            await self._check(upstream)
            await asyncio.sleep(INTERVAL_S)
        self._board.up[upstream.number] = False
        del self._watched[upstream.number]

    async def _check(self, upstream: Upstream) -> None:
        try:
            await self._health.check(upstream)
        except Exception:  # ours: the engine stays as it is, and is looked at again
            _log.exception("kvgraph cannot tell how engine %s is", upstream.url)

    def _counts(self, upstream: Upstream) -> bool:
        return upstream.number in self._listed or upstream.asked + upstream.running > 0
