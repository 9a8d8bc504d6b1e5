"""``kvgraph bench meaning``: what understanding plain traffic costs, and what is kept by it.

How well layers, ends of answers and forgeries are told apart is asserted by ``tests/hooks/vllm``.
"""

from __future__ import annotations

from typing import Final

from rich.console import Console

from ..figures import Figures, only_errors
from .costs import add_layers_cost, add_sampling_cost
from .engine_figures import FULL, QUICK, add_engine_figures

PARTS: Final = ("all", "cost", "sampling", "engine")


def run(progress: bool = True, quick: bool = False, seed: int = 1, part: str = PARTS[0]) -> Figures:
    say = Console(stderr=True, quiet=not progress).print
    figures = Figures("meaning")
    if part in ("all", "cost"):
        with only_errors():
            add_layers_cost(figures, quick, say)
    if part in ("all", "sampling"):
        add_sampling_cost(figures, quick, say)
    if part in ("all", "engine"):
        add_engine_figures(figures, QUICK if quick else FULL, seed, say)
    return figures
