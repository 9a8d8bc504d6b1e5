"""What the graph understands of traffic that nobody annotated, as figures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from ..figures import Figures, only_errors
from .chat_layers import Labelled, judge_layers
from .costs import add_layers_cost, add_sampling_cost
from .engine_figures import FULL, QUICK, add_engine_figures
from .families import FAMILIES
from .forgery_judge import believed
from .stops import Judged, judge

PARTS: Final = ("all", "answers", "cost", "sampling", "engine")
_ANSWERS: Final = 60  # of each kind and family
_CHATS: Final = 48  # of each family
_FORGERIES: Final = 40  # of each family
_QUICK: Final = 8

Say = Callable[[str], None]


def run(progress: bool = True, quick: bool = False, seed: int = 1, part: str = PARTS[0]) -> Figures:
    console = Console(stderr=True, quiet=not progress)
    figures = Figures("meaning")
    if part in ("all", "answers"):
        with only_errors():
            _add_stops(figures, _QUICK if quick else _ANSWERS, seed, console.print)
            _add_layers(figures, _QUICK if quick else _CHATS, seed, console.print)
            _add_forgeries(figures, _QUICK if quick else _FORGERIES, seed, console.print)
    if part in ("all", "cost"):
        with only_errors():
            add_layers_cost(figures, quick, console.print)
    if part in ("all", "sampling"):
        add_sampling_cost(figures, quick, console.print)
    if part in ("all", "engine"):
        add_engine_figures(figures, QUICK if quick else FULL, seed, console.print)
    return figures


def _add_layers(figures: Figures, count: int, seed: int, say: Say) -> None:
    judged: dict[str, dict[str, Labelled]] = {}
    with tempfile.TemporaryDirectory(prefix="kvgraph-meaning-") as scratch:
        for family in FAMILIES:
            done = judged[family.name] = judge_layers(
                family, Path(scratch, family.name), count, seed
            )
            for way, each in done.items():
                say(f"{family.name}, {way}: {each.accuracy:.4f} {dict(each.wrong)}")
    for way in ("chat", "stream"):
        least = min(done[way].accuracy for done in judged.values())
        figures.add(f"layer_accuracy_{way}", least, "of a family's tokens, the least", "≥ 0.99")
        for name, done in judged.items():
            figures.add(f"layer_accuracy_{way}_{name}", done[way].accuracy, "of tokens", "≥ 0.99")


def _add_forgeries(figures: Figures, count: int, seed: int, say: Say) -> None:
    found: dict[str, list[str]] = {"chat": [], "stream": []}
    with tempfile.TemporaryDirectory(prefix="kvgraph-meaning-") as scratch:
        for family in FAMILIES:
            done = believed(family, Path(scratch, family.name), count, seed)
            for way, each in done.items():
                found[way] += each
                say(f"{family.name}, {way}: {len(each)} believed {sorted(set(each))}")
    prompts = f"of {count * len(FAMILIES)} prompts"
    figures.add("forgeries_believed", len(found["chat"]), prompts, "0")
    figures.add("forgeries_believed_stream", len(found["stream"]), prompts, "0")


def _add_stops(figures: Figures, count: int, seed: int, say: Say) -> None:
    judged: dict[str, Judged] = {}
    with tempfile.TemporaryDirectory(prefix="kvgraph-meaning-") as scratch:
        for family in FAMILIES:
            done = judged[family.name] = judge(family, Path(scratch, family.name), count, seed)
            say(
                f"{family.name}: {done.accuracy:.4f} {dict(done.wrong)}, "
                f"names {done.name_accuracy:.4f} {dict(done.misnamed)}"
            )
    least = min(each.accuracy for each in judged.values())
    figures.add("stop_accuracy", least, "of a family's answers, the least", "≥ 0.99")
    named = min(each.name_accuracy for each in judged.values())
    figures.add("tool_name_accuracy", named, "of a family's calls, the least", "≥ 0.95")
    for name, each in judged.items():
        figures.add(f"stop_accuracy_{name}", each.accuracy, "of answers", "≥ 0.99")
        figures.add(f"tool_name_accuracy_{name}", each.name_accuracy, "of calls", "≥ 0.95")
