"""Runs the parts of the bench, each of which adds its figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rich.console import Console

from ..errors import BenchError
from ..figures import Figures
from . import attribution, log_cost, page_load, page_speed, shadow_error

_PARTS: Final[tuple[Callable[[Figures, bool], None], ...]] = (
    attribution.run,
    log_cost.run,
    shadow_error.run,
    page_load.run,
    page_speed.run,
)


def run(progress: bool = True, quick: bool = False) -> Figures:
    """What logs and shadows cost and how right they are; what an open page costs the sidecar."""
    figures, console = Figures("dashboard"), Console(stderr=True)
    for part in _PARTS:
        if progress:
            console.print(f"{part.__module__.rpartition('.')[2]} …")
        try:
            part(figures, quick)
        except BenchError as error:  # a machine without a browser measures the rest
            console.print(f"left out: {error}")
    return figures
