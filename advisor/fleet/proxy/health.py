"""Which engines are up: asked twice a second, and believed less the more often that was wrong."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import httpx
import orjson

from ..engine_board import EngineBoard
from .engine_metrics import CacheFacts, cache_facts
from .upstream import Upstream, refuses

INTERVAL_S: Final = 0.5
"""Between two questions; chosen: a death that no request notices is known within a second."""
TIMEOUT_S: Final = 2.0
"""For an answer; chosen."""
SLOW: Final = 3
"""Questions in a row that a silent engine may leave unanswered: a busy one is slow. Chosen."""
_LONGEST_DOUBT_S: Final = 30.0  # chosen: about as long as an engine takes to start anew
REPLACED_S: Final = 60.0
"""For which nobody serves the known models until others' may take their place; chosen: longer than
any doubt."""
_OK: Final = 200
NEEDS_KEY: Final = frozenset({401, 403})

_log = logging.getLogger(__name__)


class HashingWatch:
    """Names engines that hash blocks otherwise than the first one."""

    def __init__(self, board: EngineBoard) -> None:
        self._board = board
        self._first = ""
        self._differs: dict[int, str] = {}

    def differs(self, number: int) -> str | None:
        """How an engine's blocks differ from the others', in words; None where they do not."""
        return self._differs.get(number)

    def compare(self, upstream: Upstream, hashing: str) -> None:
        """Compare how an engine hashes blocks with how the first one does.

        Args:
            hashing: In words; empty differs from nobody's.
        """
        number = upstream.number
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
    """Marks engines up and down on the board.

    An engine is down as soon as it refuses a connection or drops a request, and after ``SLOW``
    unanswered questions: it gets no further requests. Those that it has are given up where its
    port refuses connections, and otherwise only when it hangs (``Upstream``), since one that is
    slow, or broke one answer, may answer them.
    It is up again when it says that it is well, serves the same models as the others, and some
    time has passed: twice as long after each time that it was up and dropped requests.

    The models are those of the first engine that answered. Others take their place where no engine
    is up, and all that answered last serve others or ``REPLACED_S`` have passed. What an engine
    serves that asks for an API key is not known, and not compared.

    Engines whose blocks have another size or are hashed otherwise get requests all the same: the
    proxy counts in tokens, by engine. They are named, since they cannot share a store.

    Args:
        came_back: Told of an engine that was down and is up.
        hashing: How an engine's sidecar says that it hashes blocks, by its number; "": unknown.

    Attributes:
        refused: Why an engine gets no requests though it is well, by its number.
        why: Why an engine is down, by its number.
        keyed: Numbers of engines that want an API key.
        by_metrics, by_sidecars: Which engines hash blocks otherwise than the first one. Metrics do
            not tell the seed; sidecars do.
    """

    def __init__(
        self,
        board: EngineBoard,
        came_back: Callable[[Upstream], None] = lambda upstream: None,
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
        self._models: list[str] | None = None
        self._serves: dict[int, list[str]] = {}  # by an engine's number: what it said last
        self._last_up = clock()
        self.refused: dict[int, str] = {}
        self.why: dict[int, str] = {}
        self.keyed: set[int] = set()
        self.by_metrics, self.by_sidecars = HashingWatch(board), HashingWatch(board)

    async def look(self, upstream: Upstream) -> None:
        """Ask one engine how it is, and believe it or not."""
        number = upstream.number
        try:
            well = (await upstream.ask("/health", TIMEOUT_S)).status_code == _OK
        except httpx.TimeoutException:
            self._unanswered[number] = self._unanswered.get(number, 0) + 1
            if self._unanswered[number] >= SLOW:
                upstream.is_silent = True
                self._down(upstream, f"no answer to {SLOW} questions after its health")
            return
        except httpx.RequestError as error:
            self._down(upstream, f"{type(error).__name__} {error}".strip())
            if isinstance(error, httpx.ConnectError) and refuses(error):
                upstream.is_gone()
            return
        self._unanswered[number], upstream.is_silent = 0, False
        self.by_sidecars.compare(upstream, self._hashing(number))
        if self._board.up.any():
            self._last_up = self._clock()
        if not well:
            self._down(upstream, "it says that it is not well")
        elif not self._board.up[number] and self._clock() >= self._not_before.get(number, 0.0):
            await self._admit(upstream)

    def dropped(self, upstream: Upstream, why: str) -> None:
        """Note that an engine dropped a request: whatever it says, it is down for a while."""
        number = upstream.number
        doubt = self._doubt_s.get(number, INTERVAL_S / 2)
        if self._board.up[
            number
        ]:  # of the requests that one death drops, one makes it doubted more
            doubt = self._doubt_s[number] = min(_LONGEST_DOUBT_S, 2 * doubt)
        self._not_before[number] = self._clock() + doubt
        self._down(upstream, why)

    def served(self, upstream: Upstream) -> None:
        """Note that an engine answered a request to its end: it is believed again."""
        self._doubt_s.pop(upstream.number, None)

    def differs(self, number: int) -> str | None:
        """How an engine's blocks differ from the others', in words; None where they do not."""
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
        except httpx.RequestError:
            return
        (self.keyed.add if answer.status_code in NEEDS_KEY else self.keyed.discard)(number)
        if number not in self.keyed and not self._serves_the_same(upstream, answer):
            return
        self.refused.pop(number, None)
        facts = await _facts(upstream)
        if self._clock() < self._not_before.get(number, 0.0):
            return  # it dropped a request meanwhile
        self._board.pool[number] = facts.tokens
        self.by_metrics.compare(upstream, facts.hashing)
        self._board.up[number] = True
        self.why.pop(number, None)
        self._came_back(upstream)
        key = ", and wants an API key" if number in self.keyed else ""
        _log.info("engine %s is up%s", upstream.url, key)

    def _serves_the_same(self, upstream: Upstream, answer: httpx.Response) -> bool:
        """Whether an engine's models are the fleet's; it is refused, in words, where not."""
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
        """Whether nobody serves the fleet's models any more."""
        board = self._board
        if board.up.any():
            return False
        known = [models for each, models in self._serves.items() if not board.draining[each]]
        return self._models not in known or self._clock() - self._last_up > REPLACED_S


async def _facts(upstream: Upstream) -> CacheFacts:
    try:
        return cache_facts((await upstream.ask("/metrics", TIMEOUT_S)).text)
    except httpx.RequestError:
        return CacheFacts()


def _models(answer: httpx.Response) -> list[str] | None:
    """What an engine serves, each with the longest context; None: that is no list of models."""
    if answer.status_code != _OK:
        return None
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        models = orjson.loads(answer.content)["data"]
        own = [each for each in models if not each.get("parent")]  # an adapter has one
        return sorted(map(_model, own)) or None
    return None


def _model(told: dict[str, Any]) -> str:
    longest = told.get("max_model_len")
    return str(told["id"]) + ("" if longest is None else f" ({longest} tokens)")


def _named(models: list[str] | None) -> str:
    # Whoever answers at an engine's address chose these names: a line of them, and no escapes.
    return (
        "nothing that it lists"
        if models is None
        else ", ".join(ascii(each)[1:-1] for each in models)[:400]
    )
