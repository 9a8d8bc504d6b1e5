"""Three real engines, two proxies, a sidecar and Mooncake's store, each killed in turn. It runs in
a network of its own (``apart.py``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx

from ...serving.completions import plain_body
from ...serving.model import ModelShape, ensure_model
from ...serving.vllm_server import ONE_CORE, Server, ServerPlan, check_advised
from ...serving.workload import BLOCK
from ...sidecars.sidecar_process import SidecarProcess, counted_since
from ..processes.apart import tell
from ..processes.route_process import RouteProcess
from .breaker_watch import waits_after_kill
from .kill_wave import KillWave
from .mooncake_processes import PLACE, connected, owner, start_master

ENGINES: Final = 3
REQUESTS: Final = 28
"""Of a wave; some of them end before enough answers have begun."""

SHARED: Final = 14
"""Of a wave's prompts: the first engine computed them, and the store has them."""

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
        for each in self._engines:
            check_advised(each)
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
