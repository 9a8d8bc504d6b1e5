"""The sidecar is killed again and again while a real engine serves: who notices, and how long.

The engine is vLLM itself, whose block pool is the oracle: it is *in step* while the ranking that it
holds names exactly the blocks that its pool has cached.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ...figures import Figures
from ...serving.engine_child import EngineChild, Served
from ...serving.model import TINY, ensure_model
from ...sidecars.sidecar_process import SidecarProcess, wait_until
from ..faults import Say, Size

KILLS: Final = 100
REQUESTS: Final = 10_000
_AWAY_S: Final = 0.3  # that it stays away, on top of what a start takes
_PATIENCE_S: Final = 30.0


@dataclass
class Killed:
    """How it went: ``took`` seconds from each restart's readiness until the engine was in step;
    None: never.
    """

    served: Served = field(default_factory=Served)
    took: list[float | None] = field(default_factory=list)


def kill_over_and_over(directory: Path, kills: int, requests: int, say: Say) -> Killed:
    """So many kills under load, and load until so many requests were served; raises ServerError:
    the engine ended, or hangs.
    """
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


def run(figures: Figures, size: Size, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        killed = kill_over_and_over(Path(folder), KILLS, REQUESTS, say)
    back = [seconds for seconds in killed.took if seconds is not None]
    figures.add("engine_failures", killed.served.failed, "", "0")
    figures.add("engine_requests", killed.served.answered, "", f"≥ {REQUESTS:,}")
    figures.add("kills", len(killed.took), "", f"{KILLS}")
    figures.add("resync_s", float(np.percentile(back, 99)) if back else _PATIENCE_S, "s", "p99 ≤ 5")
    figures.add("never_equal_to_oracle", len(killed.took) - len(back), "", "0")
