"""The sidecar is killed again and again while an engine serves: how soon it is in step again.

The engine is the fake one, whose memory is the oracle: in step means that the ranking which it
holds names exactly the blocks that it caches.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from ..hooks.client import ClientOptions
from ..hooks.fake import FakeEngine
from .faults import Say, Size
from .faults_sidecar import SidecarProcess, wait_until
from .figures import Figures

_POOL: Final = 500
_OPTIONS: Final = ClientOptions(tick_s=0.05, absent_s=0.3)
_PATIENCE_S: Final = 30.0


def is_in_step(engine: FakeEngine) -> bool:
    """Whether its ranking is of its memory, block for block."""
    ranking = engine.client.ranking()
    if ranking is None:
        return False
    return {*ranking.order.tolist(), *ranking.protected.tolist()} == engine.cached


def resync_times(directory: Path, kills: int, seed: int, say: Say) -> list[float | None]:
    """Seconds from each restart's readiness until it was in step; None: it never was."""
    rng, took = random.Random(seed), list[float | None]()
    with (
        SidecarProcess(directory) as sidecar,
        FakeEngine(sidecar.endpoint, num_blocks=_POOL, options=_OPTIONS) as engine,
    ):
        wait_until(lambda: is_in_step(engine), _PATIENCE_S)
        for number in range(kills):
            say(f"kill {number + 1} of {kills}")
            sidecar.kill()
            _serve(engine, rng)  # what it does meanwhile, nobody sees
            sidecar.start()
            ready = time.monotonic()
            _serve(engine, rng)
            in_step = wait_until(lambda: is_in_step(engine), _PATIENCE_S)
            took.append(time.monotonic() - ready if in_step else None)
    return took


def _serve(engine: FakeEngine, rng: random.Random) -> None:
    for _ in range(40):
        shared = list(range(32))
        engine.run([*shared, *(rng.randrange(50_000) for _ in range(16 * rng.randint(1, 9)))])
        time.sleep(0.001)


def run(figures: Figures, size: Size, say: Say) -> None:
    """Forty kills, or a hundred."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        took = resync_times(Path(folder), size.of(40, 100), size.seed, say)
    back = [seconds for seconds in took if seconds is not None]
    figures.add("resync_s", float(np.percentile(back, 99)) if back else _PATIENCE_S, "s", "≤ 5")
    figures.add("kills", len(took), "")
    figures.add("never_in_step", len(took) - len(back), "", "0")
