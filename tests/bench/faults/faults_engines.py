"""Engines are killed and others take their place: what is known of the dead, and who hears of it.

Engines with our hook are fake ones in processes of their own, behind the real client and the real
sidecar; those without are publishers of vLLM's KV events, which replay what they still have.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import time
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions

from ..figures import Figures
from ..sidecars.kv_publisher import Publisher, Watcher, stored
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from .faults import Say, Size

KILLS: Final = 20
_POOL: Final = 500
_OPTIONS: Final = ClientOptions(tick_s=0.05, absent_s=0.3)
_PATIENCE_S: Final = 30.0


@dataclass
class Gone:
    """How it went: seconds from each kill until the sidecar knew no block of that engine,
    ``hooked`` or ``observed`` (of those that publish KV events); ``foreign`` rankings named blocks
    which the engine that got them never had; of ``strange`` restarted publishers more than their
    own blocks was known.
    """

    hooked: list[float] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)
    foreign: int = 0
    strange: int = 0


class EngineProcess:
    def __init__(self, endpoint: str, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._mine, theirs = context.Pipe()
        self.name = f"engine-{number}"
        self.process = context.Process(
            target=_serve, args=(endpoint, number, self.name, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self._mine.recv()

    def foreign(self) -> int:
        """Rankings so far that were of somebody else's blocks."""
        self._mine.send("foreign")
        count: int = self._mine.recv()
        return count

    def stop(self) -> None:
        """SIGSTOP: its connection stands, and it neither reads nor speaks."""
        psutil.Process(self.process.pid).suspend()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(endpoint: str, number: int, name: str, line: Connection) -> None:
    rng, seen, foreign, epoch = random.Random(number), set[int](), 0, -1
    with FakeEngine(endpoint, num_blocks=_POOL, name=name, options=_OPTIONS) as engine:
        wait_until(lambda: engine.client.hellos, _PATIENCE_S)
        line.send("serving")
        while True:
            tokens = [number, *(rng.randrange(50_000) for _ in range(16 * rng.randint(1, 9)))]
            engine.run(tokens)
            seen.update(engine.keys(tokens))
            ranking = engine.client.ranking()
            if ranking is not None and ranking.epoch != epoch:
                epoch = ranking.epoch
                foreign += not seen.issuperset(ranking.order.tolist())
            if line.poll(0.02):
                line.recv()
                line.send(foreign)


def kill_engines(directory: Path, kills: int, say: Say) -> Gone:
    """Each is killed under advice, while the next one starts."""
    gone = Gone()
    with SidecarProcess(directory) as sidecar:
        engine = EngineProcess(sidecar.endpoint, 0)
        for number in range(kills):
            say(f"engine {number + 1} of {kills}")
            heir = EngineProcess(sidecar.endpoint, number + 1)
            wait_until(functools.partial(_is_ranked, sidecar, engine.name), _PATIENCE_S)
            gone.foreign += engine.foreign()
            engine.kill()
            killed = time.monotonic()
            wait_until(functools.partial(_is_unknown, sidecar, engine.name), _PATIENCE_S)
            gone.hooked.append(time.monotonic() - killed)
            engine = heir
        gone.foreign += engine.foreign()
        engine.kill()
    return gone


def _is_unknown(sidecar: SidecarProcess, name: str) -> bool:
    return not any(each["name"] == name for each in sidecar.status()["engines"])


def _is_ranked(sidecar: SidecarProcess, name: str) -> bool:
    engines = sidecar.status()["engines"]
    return any(each["name"] == name and (each["ranked"] or 0) > 0 for each in engines)


# Without our hook -------------------------------------------------------------------------------


def kill_publishers(directory: Path, kills: int, gone: Gone, say: Say) -> None:
    for number in range(kills):
        say(f"publisher {number + 1} of {kills}")
        replay = bool(number % 2)
        process = _publisher(directory, 1 + 100 * number, replay)
        watched = (f"ipc://{directory}/pub", f"ipc://{directory}/replay" if replay else None)
        with closing(Watcher(*watched)) as watcher:
            watcher.until(lambda: len(watcher.blocks) >= 50, _PATIENCE_S)
            process.kill()
            process.join()
            killed = time.monotonic()
            watcher.until(lambda: not watcher.blocks, _PATIENCE_S)
            gone.observed.append(time.monotonic() - killed)
            first = 100_000 + 100 * number
            process = _publisher(directory, first, replay)
            watcher.until(lambda: len(watcher.blocks) >= 50, _PATIENCE_S)
            gone.strange += min(watcher.blocks) < first
        process.kill()
        process.join()


def _publisher(directory: Path, first: int, replay: bool) -> multiprocessing.process.BaseProcess:
    for name in ("pub", "replay"):
        (directory / name).unlink(missing_ok=True)  # a killed one leaves its socket there
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_publish, args=(directory, first, replay), daemon=True)
    process.start()
    return process


def _publish(directory: Path, first: int, replay: bool) -> None:
    publisher = Publisher(directory, replay=replay)
    if not replay:
        publisher.wait_for_subscriber()
    for key in range(first, first + 50):
        publisher.publish(stored(key))
    while os.getppid() != 1:
        time.sleep(0.5)


def run(figures: Figures, size: Size, say: Say) -> None:
    gone = kill_engines(size.folder, KILLS, say)
    kill_publishers(size.folder, KILLS, gone, say)
    figures.add("killed_engine_gone_max_s", max(gone.hooked), "s", "< 2")
    figures.add("killed_publisher_gone_max_s", max(gone.observed), "s", "< 2")
    figures.add("killed_engine_foreign_rankings", gone.foreign, "", "0")
    figures.add("killed_publisher_strange_blocks", gone.strange, "", "0")
