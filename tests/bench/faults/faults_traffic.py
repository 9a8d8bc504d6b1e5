"""Everything at once over vLLM's schedulers, by a memory that remembers; and tiers too small."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Final

from ..figures import Figures
from ..paper.paper_engine import Shape, base_config
from ..paper.paper_traffic import Story, play
from ..serving.model import TINY, ensure_model
from .faults import Say, Size

Shapes = Callable[[random.Random], Shape]

POSITIONS: Final = 50_000_000
_AT_MOST_S: Final = 1800  # for as many positions; a machine that needs longer says so
_FULL_HOURS: Final = 1.0
_COPIES_S: Final = 30


def run(figures: Figures, size: Size, say: Say) -> None:
    """Fifty million positions, or as many as so many hours read; ends at the first wrong one."""
    hours = _FULL_HOURS if size.full and size.hours is None else size.hours
    if hours is None:
        story = _played(size, say, _AT_MOST_S, POSITIONS)
    else:
        story = _played(size, say, 3600 * hours)
    figures.add("positions_read", story.positions_read, "positions", f"≥ {POSITIONS:,}")
    figures.add("positions_wrong", 0, "positions", "0")  # one would have ended it
    figures.add("traffic_answers", story.counts["answers"], "requests")


def small_tiers(rng: random.Random) -> Shape:
    """An engine whose memory for copies, and disk, hold next to nothing."""
    return Shape(
        blocks=rng.randrange(30, 60),
        asynchronous=rng.random() < 0.5,
        warm=rng.choice((1, 2, 4, 8)),
        cold=rng.choice((0, 1, 2, 8)),
        workers=rng.choice((1, 2)),
    )


def run_copies(figures: Figures, size: Size, say: Say) -> None:
    """Half a minute of full arenas, full disks and copies that fail half way; or ten of it."""
    story = _played(size, say, size.of(_COPIES_S, 20 * _COPIES_S), shapes=small_tiers)
    counts = story.counts
    figures.add("copies_positions_wrong", 0, "positions", "0")  # one would have ended it
    figures.add("copies_positions_read", story.positions_read, "positions")
    figures.add("copies_unanswered", counts["requests"] - counts["answers"] - counts["aborts"],
                "requests", "0")  # fmt: skip


def _played(
    size: Size, say: Say, seconds: float, positions: int | None = None, shapes: Shapes | None = None
) -> Story:
    say("vLLM's configuration")
    os.environ["VLLM_PLUGINS"] = "kvgraph"  # no rival that happens to be installed
    config = base_config(ensure_model(TINY, size.folder / "tiny"))
    return play(config, size.seed, seconds, say=say, positions=positions, shapes=shapes)
