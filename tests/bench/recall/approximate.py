"""A model on paper that knows what is exact from what was computed behind spliced tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.hooks.recall.gate import DIRECTORY_VARIABLE, Calibration, calibration_file, save

from ..paper.paper_model import Batch, PaperModel, Text

_MARK: Final = 1 << 62  # of notes that were computed behind spliced ones
_TORN: Final = np.uint64(1)  # see ``PaperWorker``: whatever is computed is even


class ApproximateModel(PaperModel):
    """Marks what a spliced request computes behind its first spliced token; whoever else reads such
    a note, or a spliced one, reads it wrong, and that is raised. ``exact``: how many tokens are
    exact of each request that was spliced.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.workers, engine.rng)
        self.exact: dict[str, int] = {}
        self.spliced_read = 0
        self._recall = engine.side.recall

    def run(self, batch: Batch) -> None:
        """Learn first which requests are approximate by now."""
        self.exact.update(self._recall.exact)
        super().run(batch)

    def read(self, name: str, text: Text, end: int) -> None:
        """Compare what is exact; of the rest, that it is there."""
        exact = min(end, self.exact.get(name, end))
        super().read(name, text, exact)
        places = np.arange(exact, end)
        held = np.array(text.blocks[0], dtype=np.int64)[places // self._block_size]
        for worker in self.workers:
            found = worker.memory[held, places % self._block_size]
            assert not (found & _TORN).any(), f"{name} reads torn notes"
        self.spliced_read += len(places)

    def write(self, text: Text, start: int, notes: list[int]) -> None:
        """Mark what is computed behind spliced tokens."""
        name = next(each for each, known in self._texts.items() if known is text)
        exact = self.exact.get(name, start + len(notes))
        marked = [note ^ _MARK * (start + at >= exact) for at, note in enumerate(notes)]
        super().write(text, start, marked)


def recalling(engine: Any) -> Any:
    """Let ``engine`` compute with an ``ApproximateModel``; splices are always worth it."""
    engine.model = ApproximateModel(engine)
    engine.side.bridge.ledger.costs.splices_always = True
    return engine


def keep_calibration(
    model: Any, directory: Path, limits: SpliceLimits, passed: bool = True
) -> None:
    """Let engines with ``model`` find a calibration in ``directory``, in this process."""
    from kvgraph.hooks.vllm.recall.support import model_identity

    os.environ[DIRECTORY_VARIABLE] = str(directory)
    identity = model_identity(model, model.max_model_len)
    calibration = Calibration("a bench's", identity, passed, "as the bench says", limits)
    save(calibration, calibration_file(identity))
