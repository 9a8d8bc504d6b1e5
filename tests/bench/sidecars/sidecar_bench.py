"""``kvgraph bench sidecar``: what a sidecar uses, and how old its advice is, by load."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from ..engine.engine_feed import TURNS, Load, SessionFeed, pace
from ..errors import BenchError
from ..figures import Figures
from .sidecar_process import SidecarProcess, wait_until

_SETTLE_S: Final = 10.0  # until pools are full, and the first rankings are made
_LINKED_S: Final = 60.0
_LOOK_S: Final = 0.2  # between two looks at how old advice is; chosen
_TOO_OLD_S: Final = 2.0  # an engine has none that is older
_LEAST_RATE: Final = 0.95  # of the requests that were to be told of


@dataclass(frozen=True)
class Heard:
    cpu_percent: float  # of a core, once pools are full
    starting_percent: float  # the same in the seconds before
    # how old each engine's advice was, at every look from the first second on; 2 where it had
    # none
    ages_s: list[float]
    rss_gb: float  # memory at the end

    @property
    def age_p99_s(self) -> float:
        return float(np.percentile(self.ages_s, 99))


def run(progress: bool, seconds: float = 20.0) -> Figures:
    figures, console = Figures("sidecar"), Console(stderr=True, quiet=not progress)
    one, ages = Load(), list[float]()
    with console.status("") as status:
        for blocks, target in ((250, "≤ 5"), (2_000, "≤ 10")):
            status.update(f"one engine, {one.requests_per_s:g} requests/s of {blocks:,} blocks")
            heard = listened(1, blocks, one, seconds)
            figures.add(f"sidecar_cpu_{blocks}", heard.cpu_percent, "%", target)
            figures.add(f"sidecar_cpu_{blocks}_starting", heard.starting_percent, "%")
            ages += heard.ages_s
        figures.add("advice_age_p99_s", float(np.percentile(ages, 99)), "s", "≤ 0.8")
        status.update("64 engines of 20,000 blocks, 640 requests/s")
        heard = listened(64, 250, Load(requests_per_s=10, sessions=64), seconds)
        figures.add("fleet64_cpu_percent", heard.cpu_percent, "%", "≤ 50")
        figures.add("fleet64_rss_gb", heard.rss_gb, "GB", "≤ 1.5")
        figures.add("fleet64_advice_age_p99_s", heard.age_p99_s, "s", "≤ 1")
    return figures


def listened(engines: int, blocks: int, load: Load, seconds: float, turns: int = TURNS) -> Heard:
    """Let so many engines tell a sidecar of requests of so many blocks; with one turn a session,
    all of them are new.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder), policy__guard="true") as sidecar,
        contextlib.ExitStack() as stack,
    ):
        feeds = [
            stack.enter_context(SessionFeed(sidecar.endpoint, blocks, turns, load, number))
            for number in range(engines)
        ]
        if not wait_until(lambda: all(each.client.standing.linked for each in feeds), _LINKED_S):
            raise BenchError(f"the sidecar did not answer its engines within {_LINKED_S:g} s")
        ages = list[float]()
        starting = _cpu_share(sidecar, feeds, _SETTLE_S, ages)
        cpu = _cpu_share(sidecar, feeds, seconds, ages)
        if dropped := sum(each.client.dropped for each in feeds):
            raise BenchError(f"{dropped} events were dropped: the sidecar is too slow")
        return Heard(cpu, starting, ages, sidecar.rss() / 1e9)


def _cpu_share(
    sidecar: SidecarProcess, feeds: list[SessionFeed], seconds: float, ages: list[float]
) -> float:
    """Percent of a core that a sidecar uses; notes the ages of its advice meanwhile."""
    load, began, before = feeds[0].load, time.perf_counter(), sidecar.cpu_s()
    steps, looked = 0, 0.0
    for passed in pace(feeds, seconds):
        steps += 1
        if passed - looked >= _LOOK_S:
            looked = passed
            ages += _ages_s(feeds)
    took = time.perf_counter() - began
    if steps * load.a_step < _LEAST_RATE * load.requests_per_s * took:
        rate = steps * load.a_step / took
        raise BenchError(f"an engine told of {rate:.0f} requests/s, not {load.requests_per_s:g}")
    return 100 * (sidecar.cpu_s() - before) / took


def _ages_s(feeds: list[SessionFeed]) -> list[float]:
    now = time.monotonic()
    rankings = [each.client.ranking() for each in feeds]
    return [_TOO_OLD_S if each is None else max(0.0, now - each.ts) for each in rankings]
