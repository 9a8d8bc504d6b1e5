"""One of two engines stops reading: what the other one notices of it."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Final

from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions

from ...figures import Figures
from ...sidecars.sidecar_process import SidecarProcess, wait_until
from ..faults import Say, Size
from .faults_engines import EngineProcess
from .faults_http import advice_ages

_POOL: Final = 500
_PATIENCE_S: Final = 30.0


def ages_beside_a_stopped_engine(directory: Path, seconds: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    with (
        SidecarProcess(directory) as sidecar,
        FakeEngine(
            sidecar.endpoint, num_blocks=_POOL, options=ClientOptions(tick_s=0.05)
        ) as engine,
    ):
        other = EngineProcess(sidecar.endpoint, 1)
        try:
            wait_until(lambda: engine.client.ranking() is not None, _PATIENCE_S)
            other.stop()
            return advice_ages(engine, seconds, rng)
        finally:
            other.kill()


def run(figures: Figures, size: Size, say: Say) -> None:
    seconds = size.of(10, 60)
    say(f"one of two engines is stopped for {seconds} s")
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        ages = ages_beside_a_stopped_engine(Path(folder), seconds, size.seed)
    figures.add("apart_advice_age_max_s", max(ages), "s", "≤ 2")
