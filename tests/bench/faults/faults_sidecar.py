"""The sidecar is killed again and again, or stopped, there and deaf, while a real engine serves.

The engine is vLLM itself, whose block pool is the oracle: it is *in step* while the ranking that it
holds names exactly the blocks that its pool has cached.

Times to first token beside a stopped sidecar are compared with those of a stock engine that serves
in turn with it; the spread among stock's own passes is what a difference has to be seen against.
What a step waited for us is the sum of all calls of our hooks in it, less the time in which the
kernel had given the core to another process (``StepWatch``): up to 32 requests start in one step
and end in the next, in which a third as many calls are made. What our client's thread takes of a
step outside of those calls shows in the times to first token.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ..figures import Figures
from ..serving.engine_child import EngineChild, Served
from ..serving.model import TINY, ensure_model
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from .faults import Say, Size

KILLS: Final = 100
REQUESTS: Final = 10_000
_AWAY_S: Final = 0.3  # that it stays away, on top of what a start takes
_PATIENCE_S: Final = 30.0


@dataclass
class Killed:
    """``took`` seconds from each restart's readiness until in step; None: never."""

    served: Served = field(default_factory=Served)
    took: list[float | None] = field(default_factory=list)


def kill_over_and_over(directory: Path, kills: int, requests: int, say: Say) -> Killed:
    """Kill under load until so many were served; ServerError if the engine ended or hangs."""
    killed, model = Killed(), ensure_model(TINY, directory / "tiny")
    with (
        SidecarProcess(directory) as sidecar,
        EngineChild(model, directory / "engine.log", sidecar.endpoint) as engine,
    ):
        wait_until(engine.is_in_step, _PATIENCE_S)
        for number in range(kills):
            say(f"kill {number + 1} of {kills}; {killed.served.answered:,} requests served")
            engine.go()
            sidecar.kill()
            time.sleep(_AWAY_S)
            sidecar.start()
            ready = time.monotonic()
            killed.served += engine.rest()
            in_step = wait_until(engine.is_in_step, _PATIENCE_S)
            killed.took.append(time.monotonic() - ready if in_step else None)
        while killed.served.answered + killed.served.failed < requests:
            say(f"{killed.served.answered:,} of {requests:,} requests served")
            engine.go()
            time.sleep(2.0)
            killed.served += engine.rest()
    return killed


def run_kills(figures: Figures, size: Size, say: Say) -> None:
    killed = kill_over_and_over(size.folder, KILLS, REQUESTS, say)
    back = [seconds for seconds in killed.took if seconds is not None]
    figures.add("engine_failures", killed.served.failed, "", "0")
    figures.add("engine_requests", killed.served.answered, "", f"≥ {REQUESTS:,}")
    figures.add("kills", len(killed.took), "", f"{KILLS}")
    figures.add(
        "resync_s", float(np.percentile(back, 99)) if back else _PATIENCE_S, "s, p99", "≤ 5"
    )
    figures.add("never_equal_to_oracle", len(killed.took) - len(back), "", "0")


STOPPED_S: Final = 60.0
_STALE_S: Final = 3.0  # after which no ranking is acted on any more
_LOADED: Final = 0.5  # share of the time in which requests come all at once
_PASS: Final = 40  # requests, one at a time


@dataclass
class Stopped:
    """How it went: requests served while the sidecar was stopped, times to first token in seconds,
    a list a pass, and those from its going on until the engine was in step; None: never.
    """

    served: Served = field(default_factory=Served)
    ours: list[list[float]] = field(default_factory=list)
    stock: list[list[float]] = field(default_factory=list)
    back_s: float | None = None


def stop_for(directory: Path, seconds: float, say: Say) -> Stopped:
    told, model = Stopped(), ensure_model(TINY, directory / "tiny")
    with ExitStack() as stack:
        sidecar = stack.enter_context(SidecarProcess(directory))
        ours = stack.enter_context(EngineChild(model, directory / "ours.log", sidecar.endpoint))
        stock = stack.enter_context(EngineChild(model, directory / "stock.log", None))
        _serve(ours, 2.0)
        stock.first_tokens(_PASS)
        wait_until(ours.is_in_step, _PATIENCE_S)
        say(f"stopped for {seconds:.0f} s")
        sidecar.stop()
        end = time.monotonic() + seconds
        told.served += _serve(ours, _STALE_S + _LOADED * seconds)
        while time.monotonic() < end or not told.stock:
            told.ours.append(ours.first_tokens(_PASS))
            told.stock.append(stock.first_tokens(_PASS))
        told.served += ours.rest()
        sidecar.go_on()
        told.back_s = _back_in_step(ours)
    return told


def _serve(engine: EngineChild, seconds: float) -> Served:
    engine.go()
    time.sleep(seconds)
    return engine.rest()


def _back_in_step(engine: EngineChild) -> float | None:
    started = time.monotonic()
    if not wait_until(engine.is_in_step, _PATIENCE_S):
        return None
    return time.monotonic() - started


def run_stopped(figures: Figures, size: Size, say: Say) -> None:
    told = stop_for(size.folder, STOPPED_S, say)
    served, waits = told.served, np.array(told.served.waits) * 1e3
    figures.add("stopped_failures", served.failed, "", "0")
    figures.add("stopped_requests", served.answered, "")
    figures.add("stopped_step_wait_max_ms", float(waits.max()), "ms", "≤ 1")
    figures.add("stopped_step_wait_p99_ms", float(np.percentile(waits, 99)), "ms")
    figures.add("stopped_steps", len(waits), "")
    figures.add(
        "stopped_back_s", told.back_s if told.back_s is not None else _PATIENCE_S, "s", "≤ 5"
    )
    _add_first_tokens(figures, told)


def _add_first_tokens(figures: Figures, told: Stopped) -> None:
    ours = [float(np.median(each)) * 1e3 for each in told.ours]
    stock = [float(np.median(each)) * 1e3 for each in told.stock]
    middle = float(np.median(ours))
    figures.add("stopped_ttft_p50_ms", ours, "ms", f"within {min(stock):.1f} – {max(stock):.1f}")
    figures.add("stopped_ttft_p50_stock_ms", stock, "ms")
    figures.add("stopped_ttft_within", min(stock) <= middle <= max(stock), "bool", "yes")
    tails = [float(np.percentile(np.concatenate(each), 99)) for each in (told.ours, told.stock)]
    figures.add("stopped_ttft_p99_ratio", tails[0] / tails[1], "×", "≤ 1.02 on an idle machine")
