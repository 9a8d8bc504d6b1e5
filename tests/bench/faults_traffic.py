"""Fault "traffic": everything at once over vLLM's schedulers, by a memory that remembers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from .faults import Say, Size
from .figures import Figures
from .model import TINY, ensure_model
from .paper_engine import base_config
from .paper_traffic import play

_SHORT_S: Final = 240
_FULL_S: Final = 3600


def run(figures: Figures, size: Size, say: Say) -> None:
    """Random traffic and faults; see ``paper_traffic``. Ends at the first wrong position."""
    say("vLLM's configuration")
    with tempfile.TemporaryDirectory() as directory:
        config = base_config(ensure_model(TINY, Path(directory) / "tiny"))
        story = play(config, size.seed, size.of(_SHORT_S, _FULL_S), say=say)
    figures.add("positions_read", story.positions_read, "positions", "≥ 50,000,000 in an hour")
    figures.add("positions_wrong", 0, "positions", "0")  # one would have ended it
    figures.add("traffic_answers", story.counts["answers"], "requests")
    figures.add("traffic_resets", story.counts["resets"], "resets")
    figures.add("traffic_faults", story.counts["faults"], "faults")
