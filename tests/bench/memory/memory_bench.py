"""The parts of ``kvgraph bench recall`` that go through ``kvgraph memory``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvgraph.advisor.memory.settings import Mode

from ..figures import Figures
from ..recall.recall_stage import SPEED_MODELS
from ..serving.model import ensure_model
from .chat_experiments import (
    BUDGETS,
    CODING_BUDGET,
    FULL,
    PLANTED_BUDGET,
    WALL_BUDGET,
    WORD,
    Outcome,
    arm,
    coding,
    planted,
    several_facts,
    wall,
)
from .memory_stage import remembering_engine

SESSIONS: Final = 15
_TIGHT: Final = BUDGETS[-1]

Say = Callable[[str], None]


def add_chats(figures: Figures, scratch: Path, sessions: int, seed: int, say: Say) -> None:
    """Several facts, a planted one, the context wall and a coding session.

    What a chat takes is measured before a larger model, too, whose answers say nothing: the small
    one answers in the time that a step of the engine takes.
    """
    with remembering_engine(scratch) as server:
        asyncio.run(_all(figures, server.url, sessions, seed, say))
    say("a planted fact, before a model of 97 million parameters")
    with remembering_engine(scratch, model=ensure_model(SPEED_MODELS["speed"])) as server:
        asyncio.run(_add_times(figures, server.url, max(2, sessions // 3), seed))


async def _all(figures: Figures, url: str, sessions: int, seed: int, say: Say) -> None:
    say("several facts a chat, three budgets")
    await _add_several(figures, url, sessions, seed)
    say("a planted fact")
    await _add_planted(figures, url, sessions, seed)
    say("the context wall")
    await _add_wall(figures, url, seed)
    say("a coding session")
    await _add_coding(figures, url, seed)


async def _add_several(figures: Figures, url: str, sessions: int, seed: int) -> None:
    _rights(figures, "multifact_full", await several_facts(url, FULL, sessions, seed))
    others: dict[str, float] = {}
    for budget in BUDGETS:
        for mode in Mode:
            done = await several_facts(url, arm(mode, budget), sessions, seed)
            share = _rights(figures, f"multifact_{mode}_{budget}", done)
            if budget == _TIGHT and mode is not Mode.KV_RESTORE:
                others[mode] = share
            elif budget == _TIGHT:
                target = "≥ 4 × the best other"
                figures.add("multifact_recovery", share, "of answers right", target)
    figures.add("multifact_best_other", max(others.values()), "of answers right")
    for name, more in (("top_2", {"top": 2}), ("top_4", {"top": 4}), ("computed", {})):
        settings, recalls = arm(Mode.KV_RESTORE, BUDGETS[1], **more), name != "computed"
        done = await several_facts(url, settings, sessions, seed, recall=recalls)
        _rights(figures, f"ablation_{name}", done)


async def _add_planted(figures: Figures, url: str, sessions: int, seed: int) -> None:
    ours, theirs = await _planted_twice(url, sessions, seed)
    _rights(figures, "planted_recalled", ours)
    _rights(figures, "planted_truncated", theirs)
    figures.add("planted_evictions", ours.evicted / sessions, "blocks per chat")
    figures.add("planted_spliced_share", ours.seen.spliced / ours.seen.prompt, "of prompt tokens")
    figures.add("planted_wall_ratio_small", _times(ours, theirs), "×")


async def _add_times(figures: Figures, url: str, sessions: int, seed: int) -> None:
    ours, theirs = await _planted_twice(url, sessions, seed, word="w")
    share = ours.seen.spliced / ours.seen.prompt
    figures.add("planted_spliced_share_large", share, "of prompt tokens")
    figures.add("planted_chat_s", theirs.seconds, "s")
    figures.add("planted_wall_ratio", _times(ours, theirs), "×", "≤ 1.1")


async def _planted_twice(
    url: str, sessions: int, seed: int, word: str = WORD
) -> tuple[Outcome, Outcome]:
    """A planted fact with recall, and where what leaves the budget is gone."""
    ways = [arm(mode, PLANTED_BUDGET) for mode in (Mode.KV_RESTORE, Mode.DISCARD)]
    await planted(url, ways, 1, seed + 1, word)  # for caches and connections
    ours, theirs = await planted(url, ways, sessions, seed, word)
    return ours, theirs


def _times(ours: Outcome, theirs: Outcome) -> list[float]:
    return [mine / other for mine, other in zip(ours.seconds, theirs.seconds, strict=True)]


async def _add_wall(figures: Figures, url: str, seed: int) -> None:
    ours = await wall(url, arm(Mode.KV_RESTORE, WALL_BUDGET), seed)
    theirs = await wall(url, arm(Mode.DISCARD, WALL_BUDGET), seed)
    figures.add("wall_completed", True, "bool", "true")
    figures.add("wall_peak_ratio", ours.seen.peak / WALL_BUDGET, "of the budget", "≤ 1")
    figures.add("wall_recalled", ours.recalled, "blocks")
    figures.add("wall_spliced", ours.seen.spliced, "tokens")
    _rights(figures, "wall_right", ours)
    _rights(figures, "wall_right_discard", theirs)


async def _add_coding(figures: Figures, url: str, seed: int) -> None:
    for mode in Mode:
        done = await coding(url, arm(mode, CODING_BUDGET), seed)
        _rights(figures, f"coding_{mode}_right", done)
        figures.add(f"coding_{mode}_seen", done.seen.prompt, "prompt tokens")
        figures.add(f"coding_{mode}_decoded", done.seen.decoded, "tokens")
        figures.add(f"coding_{mode}_recovered", done.seen.spliced, "tokens")
        if mode is Mode.KV_RESTORE:
            figures.add("coding_recalled", done.recalled, "blocks")
            figures.add("identity_mismatches", done.mismatches, "blocks", "0")


def _rights(figures: Figures, name: str, done: Outcome) -> float:
    n = len(done.right)
    return figures.add_share(name, sum(done.right), n, f"of {n} answers right")
