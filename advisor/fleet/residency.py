"""``ResidencyView``: what engines hold of sessions, as reported by their sidecars."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import aiohttp
import msgspec

from ...graph.wire.endpoints import RunningSidecar, running_sidecars
from ...graph.wire.frames import BAD_PAYLOAD
from ..tools.remote import TOKEN_VARIABLE
from .router import Holdings
from .upstream import AS_IT_IS, whole_answer

_MOST_TOKENS: Final = 1 << 40  # of a context; chosen: sums of them fit in 64 bits

_Blocks = Annotated[int, msgspec.Meta(ge=0)]


class AdvisedEngine(NamedTuple):
    """An engine's name at its sidecar; an engine of another sidecar may have the same name."""

    sidecar: str
    name: str


class HeldContext(NamedTuple):
    """The shares of a session's last context that an engine holds."""

    engine: AdvisedEngine
    tokens: int
    pool: float  # in its pool
    copied: float  # in its pool or its own tiers; at least ``pool``
    shared: float  # in a store that engines share
    idle_s: float  # seconds since its sidecar last saw the session


def sessions_in(sidecar: str, content: bytes) -> dict[str, HeldContext]:
    """Parse a sidecar's ``/v1/sessions``; sessions that two tenants give the same name are left
    out.

    Raises one of BAD_PAYLOAD.
    """
    found: dict[str, HeldContext | None] = {}
    for each in _sessions.decode(content).sessions:
        found[each.session] = None if each.session in found else _held(sidecar, each)
    return {name: held for name, held in found.items() if held is not None}


class _Session(msgspec.Struct):
    session: str
    engine: str | None
    tokens: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
    chain: _Blocks
    chain_pool: _Blocks
    chain_copied: _Blocks
    idle_s: float
    chain_shared: _Blocks = 0


class _Sessions(msgspec.Struct):
    sessions: list[_Session]


class _Engine(msgspec.Struct):
    id: str
    hashing: str = ""


class _Status(msgspec.Struct):
    engines: list[_Engine]


_sessions: Final = msgspec.json.Decoder(_Sessions)
_status: Final = msgspec.json.Decoder(_Status)


def _held(sidecar: str, told: _Session) -> HeldContext | None:
    if told.engine is None or told.chain == 0:
        return None
    engine = AdvisedEngine(sidecar, told.engine)
    told_of = told.chain_pool, told.chain_copied, told.chain_shared
    pool, copied, shared = (min(blocks / told.chain, 1.0) for blocks in told_of)
    return HeldContext(engine, told.tokens, pool, max(pool, copied), shared, told.idle_s)


INTERVAL_S: Final = 1.0  # seconds between two rounds; chosen: a sidecar ranks twice a second
TIMEOUT_S: Final = 2.0  # timeout for a sidecar's whole answer; chosen
MOST_SESSIONS: Final = 1000  # the sidecar's own limit: those active last

_OK, _BUSY = 200, 503
_SILENT: Final = (aiohttp.ClientError, TimeoutError)
_MEANS: Final = {
    400: ": it does not know this address as its own (http.allowed_hosts)",
    401: f": its token is not {TOKEN_VARIABLE}'s",
}

_log = logging.getLogger(__name__)


class ResidencyView:
    """Polls sidecars for what their engines hold of sessions, and merges the answers.

    With a sidecar per machine, each reports on a session that was on several machines. A session to
    which two tenants of one sidecar give the same name is left out.
    """

    def __init__(
        self,
        # finds them; by default this user's on this machine
        sidecars: Callable[[], list[RunningSidecar]] = running_sidecars,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sidecars, self._clock = sidecars, clock
        self._held: dict[str, list[HeldContext]] = {}  # by session, the newest report first
        self._votes: dict[
            AdvisedEngine, Counter[int]
        ] = {}  # sessions at home at each of our numbers
        self._hashing: dict[str, dict[str, str]] = {}  # by sidecar, engine → how, in words
        # Sidecar → why its last poll failed; None: it answered.
        self.silent: dict[str, str | None] = {}
        self.failed = 0  # rounds that raised an error of ours
        self._began = clock()
        self._answered_at: dict[str, float] = {}  # when each sidecar answered last

    def __len__(self) -> int:
        return len(self._held)

    async def watch(self) -> None:
        """Poll endlessly; errors are logged and counted."""
        while True:
            try:
                await self.poll()
            except Exception:
                if not self.failed:
                    _log.exception("kvgraph cannot ask sidecars; it goes on trying")
                self.failed += 1
            await asyncio.sleep(INTERVAL_S)

    def unheard_s(self, sidecar: str) -> float:
        """Return the seconds since a sidecar last answered; if it never did, since the start."""
        return self._clock() - self._answered_at.get(sidecar, self._began)

    async def poll(self) -> None:
        held: dict[str, list[HeldContext]] = {}
        sidecars = self._sidecars()
        self._forget_others({each.http: self.silent.get(each.http) for each in sidecars})
        for found in await asyncio.gather(*map(self._poll_one, sidecars)):
            for name, each in found.items():
                held.setdefault(name, []).append(each)
        for several in held.values():
            several.sort(key=lambda each: each.idle_s)
        self._held = held

    def note_home(self, name: str, engine: int) -> None:
        """Learn that this number is that of the engine that a sidecar names for this session.

        If several sidecars know the session, the one that saw it last counts. A sidecar may not
        know yet that a session moved, so the number with the most votes wins.
        """
        if held := self._held.get(name):
            self._votes.setdefault(held[0].engine, Counter())[engine] += 1

    def hashing(self, number: int) -> str:
        """Describe how an engine hashes blocks, for all of its ranks; empty while unknown."""
        ways = {
            way
            for sidecar, engines in self._hashing.items()
            for engine, way in engines.items()
            if way and self._likeliest(AdvisedEngine(sidecar, engine)) == number
        }
        return "; ".join(sorted(ways))

    def corrected(self, name: str, remembered: Holdings) -> Holdings:
        """Correct an estimate of what engines hold, made from the prompts sent there, by the
        sidecars' reports: only these know what their engines evicted, in whatever order, and which
        copies they have.
        """
        pool, copied = remembered.pool.copy(), remembered.copied.copy()
        lost = remembered.lost.copy()
        advised = [self._likeliest(each) for each in self._votes]
        lost[[number for number in advised if number is not None]] = False
        shared = remembered.shared
        for held in reversed(self._held.get(name, ())):  # the newest report wins
            if (number := self._likeliest(held.engine)) is not None:
                # Its sidecar may not have heard yet of the turn that was sent there last.
                context = max(int(remembered.pool[number]), held.tokens)
                pool[number], copied[number] = held.pool * context, held.copied * context
                lost[number] = True
            shared = max(shared, int(held.shared * held.tokens))
        return Holdings(pool, copied, shared, lost)

    def _forget_others(self, silent: dict[str, str | None]) -> None:
        """Drop what is known of other sidecars: one that is gone comes back at another port."""
        for gone in self.silent.keys() - silent.keys():
            _log.warning("sidecar %s is gone: what its engines hold is guessed", gone)
        self.silent = silent
        self._votes = {each: told for each, told in self._votes.items() if each.sidecar in silent}
        self._hashing = {each: told for each, told in self._hashing.items() if each in silent}
        self._answered_at = {each: at for each, at in self._answered_at.items() if each in silent}

    def _likeliest(self, engine: AdvisedEngine) -> int | None:
        votes = self._votes.get(engine)
        return votes.most_common(1)[0][0] if votes else None

    async def _poll_one(self, sidecar: RunningSidecar) -> dict[str, HeldContext]:
        """Poll one sidecar; returns nothing if it does not answer."""
        try:
            url = f"{sidecar.http}/v1/sessions?limit={MOST_SESSIONS}"
            status, content = await _get(url, {"Authorization": f"Bearer {sidecar.token}"})
            if status != _OK:
                if status != _BUSY:
                    self._note(sidecar.http, f"answers {status}{_MEANS.get(status, '')}")
                return {}
            found = sessions_in(sidecar.http, content)
        except Exception as error:  # whatever its answer and its note say: others are polled too
            if isinstance(error, _SILENT) and not isinstance(error, ValueError):
                self._note(sidecar.http, "does not answer")
                return {}
            why = str(error) or type(error).__name__
            self._note(sidecar.http, f"does not answer as a sidecar does ({why})")
            return {}
        self._note(sidecar.http, None)
        self._answered_at[sidecar.http] = self._clock()
        await self._ask_hashing(sidecar, {each.engine.name for each in found.values()})
        return found

    def _note(self, sidecar: str, silent: str | None) -> None:
        """Record how a poll ended, and log a change."""
        before, self.silent[sidecar] = self.silent.get(sidecar), silent
        if silent is not None and silent != before:
            _log.warning("sidecar %s %s: what its engines hold is guessed", sidecar, silent)
        elif silent is None and before is not None:
            _log.info("sidecar %s answers again", sidecar)

    async def _ask_hashing(self, sidecar: RunningSidecar, engines: set[str]) -> None:
        """Ask once how engines hash blocks: that does not change while they run."""
        if engines <= self._hashing.get(sidecar.http, {}).keys():
            return
        try:
            status = _status.decode((await _get(f"{sidecar.http}/status", {}))[1])
        except (*_SILENT, *BAD_PAYLOAD):
            return  # it is asked again next time; what it said of sessions stands
        told = {each.id: each.hashing for each in status.engines}
        self._hashing[sidecar.http] = {each: told.get(each, "") for each in engines}


async def _get(url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    async with (
        asyncio.timeout(TIMEOUT_S),
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(url, headers={**headers, **AS_IT_IS}, allow_redirects=False) as answer,
    ):
        return answer.status, await whole_answer(answer)
