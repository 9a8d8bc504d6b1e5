"""What ``kill -9`` of each part of a fleet costs, in a network of its own (``apart``)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx
from kvgraph.hooks.store.stores import MooncakeStore
from kvgraph.hooks.vllm.tiers.sharing import StoreLookup

from ..errors import BenchError
from ..figures import Figures
from ..serving.completions import plain_body
from ..serving.model import ModelShape, ensure_model
from ..serving.vllm_server import ONE_CORE, Server, ServerPlan
from ..serving.workload import BLOCK
from ..sidecars.sidecar_process import SidecarProcess, counted_since
from .apart import run_apart, tell
from .kill_wave import KillWave
from .mooncake_processes import PLACE, connected, owner, start_master, why_not
from .router_process import RouteProcess

BEGUN_THERE: Final = ("engine", "router")
"""Killed ones that pass answers on: one that had begun there is cut."""

STAGE: Final = __name__
LONGEST_S: Final = 900.0


def add_kills(figures: Figures, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Kill each part of a fleet with requests in flight; returns each wave, by what was killed."""
    if reason := why_not():
        raise BenchError(f"the store's master and owner cannot be killed: {reason}")
    breaker = run_apart(STAGE, "breaker", say, LONGEST_S)
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        waves = run_apart(STAGE, folder, say, LONGEST_S)
    add_waves(figures, waves)
    figures.add("breaker_s", breaker["longest_s"], "s", "< 1")
    figures.add("waited_for_dead_store", breaker["requests"], f"of {breaker['asked']} requests")
    return waves


def add_waves(figures: Figures, waves: dict[str, dict[str, Any]]) -> None:
    failed = {name: failed_in(name, facts) for name, facts in waves.items()}
    figures.add("failed_after_kill", sum(failed.values()), "requests", "0")
    fewest = min(each["in_flight"] for each in waves.values())
    figures.add("in_flight_at_kill", fewest, "requests", "≥ 20")
    for name in BEGUN_THERE:
        figures.add(f"cut_by_kill_of_{name}", waves[name]["cut"], "begun there")
    figures.add("asked_again_after_router", waves["router"]["asked_again"], "requests")
    for name, facts in waves.items():
        figures.add(f"store_loaded_{name}", facts["store_loaded"], "blocks")


def failed_in(name: str, facts: dict[str, Any]) -> int:
    """Requests that failed though no answer of theirs had begun at what was killed."""
    cut: int = 0 if name in BEGUN_THERE else facts["cut"]
    failed: int = facts["failed"]
    return failed + cut


_TICK_S: Final = 0.01  # between two requests that ask; chosen
_WATCHED_S: Final = 4.0  # less than the first call blocks
_CALM_S: Final = 0.5  # of questions that are answered before the kill; chosen
_NAME: Final = "model"


@dataclass(frozen=True, slots=True)
class Waits:
    """What requests waited for: the longest time for the store's word, how many waited, of
    ``asked``, and how long asking kept the engine's thread at most.
    """

    longest_s: float
    requests: int
    asked: int
    step_s: float


def waits_after_kill(store: MooncakeStore, master: subprocess.Popen[bytes]) -> Waits:
    """Kill the master while requests come, each of which asks the store for its prompt."""
    lookup = StoreLookup(store, time.monotonic)
    lookup.names = [_NAME]
    _ask_for(lookup, _CALM_S)
    master.kill()
    master.wait()
    return _ask_for(lookup, _WATCHED_S)


def _ask_for(lookup: StoreLookup, seconds: float) -> Waits:
    longest = step_s = 0.0
    waiting: dict[str, None] = {}
    numbers, waited = count(), set[str]()
    begin = now = since = time.monotonic()
    while now < begin + seconds:
        name = f"{begin} {next(numbers)}"
        lookup.ask(name, [name.encode()])
        waiting[name] = None
        for each in [each for each in waiting if not lookup.waits(each)]:
            del waiting[each]
            lookup.forget(each)
        step_s = max(step_s, time.monotonic() - now)
        time.sleep(_TICK_S)
        since, now = since if waiting else now, time.monotonic()
        waited.update(waiting)
        longest = max(longest, now - since if waiting else 0.0)
    return Waits(longest, len(waited), next(numbers), step_s)


ENGINES: Final = 3
REQUESTS: Final = 28  # of a wave; some of them end before enough answers have begun

SHARED: Final = 14  # of a wave's prompts: the first engine computed them, and the store has them

CONTEXT: Final = 512
ANSWER: Final = 48
OWNED: Final = 512 << 20
POOL_TOKENS: Final = 8192  # of each engine; chosen
SHAPE: Final = ModelShape()
_SETTLED_S: Final = 2.0  # until what was computed is in the store; chosen


class KillStage:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dice = random.Random(11)
        self._stack = ExitStack()
        self._waves = 0

    def play(self) -> dict[str, Any]:
        with self._stack as stack:
            self._master = start_master()
            stack.callback(self._master.kill)
            connected().close()
            self._owner = stack.enter_context(owner(OWNED))
            self._sidecar = stack.enter_context(SidecarProcess(self._folder))
            self._engines = [stack.enter_context(self._engine(n)) for n in range(1, ENGINES + 1)]
            self._routes = [stack.enter_context(self._route(n)) for n in (1, 2)]
            for each in self._engines:
                asyncio.run(self._give(each, [self._prompt()]))
            facts = {
                name: self._wave(name, kill)
                for name, kill in (
                    ("sidecar", self._kill_sidecar),
                    ("owner", self._kill_owner),
                    ("router", self._kill_router),
                    ("engine", self._kill_engine),
                    ("master", self._kill_master),
                )
            }
        return facts

    def _engine(self, number: int) -> Server:
        settings = {
            "AITHER_KVCACHE_SIDECAR": self._sidecar.endpoint,
            "AITHER_KVCACHE_WARM_GIB": "0.25",
            "AITHER_KVCACHE_STORE": PLACE,
            "AITHER_KVCACHE_STORE_GIB": str(1 / 64),
            "AITHER_KVCACHE_STORE_OPEN": "1",
            **ONE_CORE,
        }
        model = ensure_model(SHAPE, self._folder / "model")
        plan = ServerPlan(
            str(model), True, self._folder, blocks=POOL_TOKENS // BLOCK, max_model_len=1024,
            max_num_seqs=3, name=f"engine-{number}", settings=tuple(settings.items()),
        )  # fmt: skip
        tell(f"engine {number} starts")
        return Server(plan)

    def _route(self, number: int) -> RouteProcess:
        urls = [each.url for each in self._engines]
        return RouteProcess(urls, self._folder, self._folder / f"route-{number}.log")

    def _wave(self, name: str, kill: Callable[[], None]) -> dict[str, Any]:
        before = self._store_counts()
        prompts = [self._prompt() for _ in range(SHARED)]
        asyncio.run(self._give(self._engines[0], prompts))
        time.sleep(_SETTLED_S)
        prompts += [self._prompt() for _ in range(REQUESTS - SHARED)]
        self._dice.shuffle(prompts)
        self._waves += 1
        bodies = [plain_body(f"{name}-{at}", each, ANSWER) for at, each in enumerate(prompts)]
        routes = self._routes if name == "router" else self._routes[:1]
        wave, began = KillWave([each.url for each in routes], bodies), time.monotonic()
        end = asyncio.run(wave.play(_aside(kill)))
        facts = {**end.facts(), "wall_s": round(time.monotonic() - began, 2)}
        self._heal(name)
        after = self._store_counts()
        facts.update({each: counted_since(before[each], after[each]) for each in after})
        facts["proxy"] = self._routes[0].status()["requests"]
        facts["ended"] = [each.plan.name for each in self._engines if not each.runs]
        tell(f"{name}: {facts}")
        return facts

    async def _give(self, engine: Server, prompts: list[list[int]]) -> None:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            url = f"{engine.url}/v1/completions"
            bodies = [
                plain_body(f"g{self._waves}-{at}", each, 1) for at, each in enumerate(prompts)
            ]
            await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    def _heal(self, name: str) -> None:
        if name == "sidecar":
            self._sidecar.start()
        elif name == "owner":
            self._owner = self._stack.enter_context(owner(OWNED))
        elif name == "router":
            self._routes.pop(0)

    def _store_counts(self) -> dict[str, dict[str, int]]:
        """Blocks that went to the store and came from it so far, as far as the sidecar heard."""
        self._sidecar.let_engines_report()
        names = ("shared", "store_loaded", "store_failed")
        return {name: self._sidecar.tier_events(name) for name in names}

    def _kill_sidecar(self) -> None:
        self._sidecar.kill()

    def _kill_owner(self) -> None:
        self._owner.kill()

    def _kill_router(self) -> None:
        self._routes[0].kill()

    def _kill_engine(self) -> None:
        self._engines[1].kill()

    def _kill_master(self) -> None:
        self._master.kill()
        self._master.wait()

    def _prompt(self) -> list[int]:
        return [self._dice.randrange(3, SHAPE.vocab) for _ in range(CONTEXT)]


def play(what: str) -> dict[str, Any]:
    return _breaker() if what == "breaker" else KillStage(Path(what)).play()


def _breaker() -> dict[str, float]:
    master = start_master()
    try:
        return asdict(waits_after_kill(connected(64 << 20), master))
    finally:
        master.kill()


def _aside(kill: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def killing() -> None:
        await asyncio.to_thread(kill)

    return killing
