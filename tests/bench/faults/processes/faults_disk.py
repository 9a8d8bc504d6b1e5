"""A disk that is full or gone under a sidecar: it serves from memory, and its metrics say so."""

from __future__ import annotations

import random
import resource
import tempfile
from pathlib import Path
from typing import Any, Final

from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions

from ...figures import Figures
from ...sidecars.sidecar_process import SidecarProcess, wait_until
from ..faults import Say, Size

_POOL: Final = 500
_PATIENCE_S: Final = 30.0
_FAILED: Final = 'kvgraph_snapshot_total{what="failed"}'
_SAVED: Final = 'kvgraph_snapshot_total{what="saved"}'
_UNBOUND: Final = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class _Bench:
    """A sidecar that saves often, and an engine that never rests."""

    def __init__(self, sidecar: SidecarProcess, engine: FakeEngine, seed: int) -> None:
        self._sidecar, self._engine = sidecar, engine
        self._rng = random.Random(seed)
        self.unadvised = 0
        self.looks = 0

    def until_more(self, sample: str) -> bool:
        """Serve until ``sample`` of the metrics has grown; False: it did not."""
        before = self._sidecar.samples().get(sample, 0.0)
        return wait_until(lambda: self._grown(sample, before), _PATIENCE_S, 0.05)

    def _grown(self, sample: str, before: float) -> bool:
        self._engine.run([self._rng.randrange(50_000) for _ in range(160)])
        self.looks += 1
        self.unadvised += self._engine.client.ranking() is None
        return self._sidecar.samples().get(sample, 0.0) > before


def run(figures: Figures, size: Size, say: Say) -> None:
    """Full, well, gone, well; the kernel refuses the bytes, so what writes is the real thing."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        _mistreat(figures, Path(folder), size, say)


def _mistreat(figures: Figures, folder: Path, size: Size, say: Say) -> None:
    kept, away = folder / "kept", folder / "away"
    kept.mkdir()
    settings: dict[str, Any] = {
        "sidecar__snapshot_path": kept / "graph.snap",
        "sidecar__snapshot_interval_s": 0.2,
    }
    options = ClientOptions(tick_s=0.05)
    with (
        SidecarProcess(folder, **settings) as sidecar,
        FakeEngine(sidecar.endpoint, num_blocks=_POOL, options=options) as engine,
    ):
        wait_until(lambda: engine.client.ranking() is not None, _PATIENCE_S)
        bench = _Bench(sidecar, engine, size.seed)
        told = [bench.until_more(_SAVED)]
        say("a file may have 4 KiB")
        sidecar.process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        told.append(bench.until_more(_FAILED))
        sidecar.process.rlimit(resource.RLIMIT_FSIZE, _UNBOUND)
        told.append(bench.until_more(_SAVED))
        say("a file stands where the directory was")
        kept.rename(away)
        kept.touch()
        told.append(bench.until_more(_FAILED))
        kept.unlink()
        away.rename(kept)
        told.append(bench.until_more(_SAVED))
    figures.add("disk_changes_not_told", told.count(False), "", "0")
    figures.add("disk_looks_without_advice", bench.unadvised, f"of {bench.looks}", "0")
