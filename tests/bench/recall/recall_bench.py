"""``kvgraph bench recall``: what comes back, how fast, and that nobody else meets it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ..figures import Figures
from ..recorded.agents_requests import SESSIONS as RECORDED
from .compactions import CAPACITIES, play_compactions
from .compactions import SESSIONS as AGENTS
from .cross_hits import REQUESTS, run_crossed
from .recall_stage import LENGTHS, SPEED_MODELS, start

PARTS: Final = ("all", "mixed", "exact", "speed", "needle", "places", "chats", "compacted")
ROUNDS: Final = 9  # of each length; the medians are reported
PLAIN: Final = 120  # requests of the real engine, half of them plain


def run(progress: bool, part: str = "all", quick: bool = False, seed: int = 1) -> Figures:
    """Run the parts that are asked for."""
    say: Callable[[str], None] = Console(stderr=True).print if progress else _nothing
    figures = Figures("recall")
    with tempfile.TemporaryDirectory(prefix="kvg-") as scratch:
        if part in ("all", "mixed"):
            say("mixed requests of several tenants, above vLLM's scheduler")
            _add_crossed(figures, REQUESTS // 20 if quick else REQUESTS, seed)
        if part in ("all", "exact"):
            say("plain requests beside those with recall, on a real engine, and on stock")
            _add_exact(figures, Path(scratch), PLAIN // 4 if quick else PLAIN)
        if part in ("all", "compacted"):
            say("made-up compactions over recorded shapes, in the lab")
            _add_compacted(figures, AGENTS // 4 if quick else AGENTS, seed)
        if part in ("all", "speed"):
            say("saved, loaded and computed again, through requests of a real engine")
            _add_speed(figures, Path(scratch), 3 if quick else ROUNDS)
        if part in ("all", "needle"):
            from .needle import TEXTS, add_needles

            add_needles(figures, Path(scratch), TEXTS // 10 if quick else TEXTS, seed, say)
        if part in ("all", "places"):
            from .needle import TEXTS, add_landings

            add_landings(figures, Path(scratch), TEXTS // 10 if quick else TEXTS, seed, say)
        if part in ("all", "chats"):
            from ..memory.memory_bench import SESSIONS, add_chats

            add_chats(figures, Path(scratch), SESSIONS // 5 if quick else SESSIONS, seed, say)
    return figures


def _add_crossed(figures: Figures, requests: int, seed: int) -> None:
    seen = run_crossed(requests, seed)
    figures.add("mixed_requests", seen.requests, "requests")
    figures.add("cross_hits", seen.cross_hits, "requests", "0")
    figures.add("mixed_spliced_requests", seen.spliced, "requests")
    figures.add("mixed_exact_share", seen.exact / max(1, seen.prompt), "of opted-in tokens")
    figures.add("mixed_recovered_share", seen.recovered / max(1, seen.prompt), "of opted-in tokens")


def _add_exact(figures: Figures, scratch: Path, requests: int) -> None:
    ours, stock = (start("exact", recall, scratch, count=requests) for recall in (True, False))
    plain = [(mine, theirs) for mine, theirs in zip(ours, stock, strict=True) if not mine["asks"]]
    asked = [row for row in ours if row["asks"]]
    same = sum(mine["tokens"] == theirs["tokens"] for mine, theirs in plain)
    figures.add("exact_identical", same / len(plain), "of plain answers", "1")
    figures.add("plain_requests", len(plain), "requests")
    recovered = sum(row.get("spliced", 0) for row in asked)
    prompt = sum(row["prompt"] for row in asked)
    figures.add("tokens_recovered", recovered, "tokens")
    figures.add("tokens_recovered_share", recovered / prompt, "of opted-in tokens")


def _add_speed(figures: Figures, scratch: Path, rounds: int) -> None:
    for part in SPEED_MODELS:
        rows: list[dict[str, Any]] = start(part, True, scratch, count=rounds)
        suffix = part.removeprefix("speed")
        for length in LENGTHS:
            name, of = f"{length}{suffix}", [row for row in rows if row["tokens"] == length]
            for how in ("recalled", "resident", "computed"):
                figures.add(f"{how}_ms_{name}", [1e3 * row[f"{how}_s"] for row in of], "ms")
            recalled = [row for row in of if row["spliced"] == length]
            ratios = [row["computed_s"] / row["recalled_s"] for row in recalled]
            if ratios:
                target = "≥ 20" if length == 640 else ""
                figures.add(f"splice_vs_prefill_{name}", ratios, "×", target)


def _add_compacted(figures: Figures, sessions: int, seed: int) -> None:
    for blocks in CAPACITIES:
        unit = f"of prompts, {blocks} blocks"
        done = play_compactions(RECORDED, blocks, seed, sessions)
        figures.add(f"synthetic_exact_share_{blocks}", done.exact / done.prompt, unit)
        figures.add(f"synthetic_lost_share_{blocks}", done.lost / done.prompt, unit)
        share = done.recovered / max(1, done.lost)
        figures.add(f"synthetic_recovered_share_{blocks}", share, "of what is lost")
        first = play_compactions(RECORDED, blocks, seed, sessions, generations=1)
        share = first.recovered / max(1, first.lost)
        figures.add(f"synthetic_first_generation_{blocks}", share, "of what is lost")
    figures.add("synthetic_compactions", done.compactions, "prompts")


def _nothing(text: str) -> None:
    pass
