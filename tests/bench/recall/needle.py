"""A fact that fell out of a session's budget: who still knows it?

The engine serves whole prompts, so its arms differ in what of the text they put into the prompt.
What acts inside of a sequence runs in torch, on the same texts and weights, and so does ours once
more: both must say the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from ..confkv.resampled import wilson
from ..confkv.small_models import shipped
from ..figures import Figures
from .landings import add_places, add_right
from .needle_texts import ARMS, BUDGETS, draw
from .needles_in_torch import EVICTING, landings_in_torch, needles_in_torch
from .recall_stage import start
from .recalling_rivals import RECALLING

TEXTS: Final = 60
TIGHT: Final = BUDGETS[1]  # the budget of the figures without a number: 3.6 × less

Say = Callable[[str], None]
Right = dict[str, list[bool]]


def add_needles(figures: Figures, scratch: Path, texts: int, seed: int, say: Say) -> None:
    """The share of answers that each arm gets right, with Wilson's intervals."""
    (folder,) = shipped("recall")
    say("needles on a real engine")
    served = start("needle", True, scratch, count=texts, seed=seed)
    say("needles in torch: the same splices, caches that evict, and caches that read back")
    rights: Right = served["right"] | needles_in_torch(folder, draw(texts, seed))
    for name, right in rights.items():
        add_right(figures, f"needle_{name}", right)
    figures.add("needle_texts", texts, "texts")
    figures.add("needle_spliced_share", served["spliced"] / served["prompt"], "of prompt tokens")
    _add_verdict(figures, rights)


def add_landings(figures: Figures, scratch: Path, texts: int, seed: int, say: Say) -> None:
    """The same by where text comes back, whose it is, and in which order."""
    (folder,) = shipped("recall")
    say("text that lands elsewhere, on a real engine")
    add_places(figures, start("places", True, scratch, count=texts, seed=seed))
    say("text that lands elsewhere, in torch")
    for where, right in landings_in_torch(folder, draw(texts, seed)).items():
        add_right(figures, f"place_torch_{where}", right)


def _add_verdict(figures: Figures, rights: Right) -> None:
    share = {name: float(np.mean(right)) for name, right in rights.items()}
    ours = share[f"restored_{TIGHT}"]
    others = [*(arm for arm in ARMS if arm != "restored"), *EVICTING]
    best = max(others, key=lambda arm: share[f"{arm}_{TIGHT}"])
    recalling = max((arm.name for arm in RECALLING), key=lambda arm: share[f"{arm}_{TIGHT}"])
    figures.add("needle_recovery", ours, "right at 3.6 ×", f"≥ {share['full'] - 0.05:.3f}")
    figures.add("needle_best_other", share[f"{best}_{TIGHT}"], f"right: {best}", "< 0.5")
    figures.add("needle_best_recalling", share[f"{recalling}_{TIGHT}"], f"right: {recalling}")
    pairs = zip(rights[f"restored_{TIGHT}"], rights[f"torch_restored_{TIGHT}"], strict=True)
    same = [mine == theirs for mine, theirs in pairs]
    figures.add("needle_engine_as_torch", float(np.mean(same)), "of texts, right or wrong in both")
    within = all(_agree(rights, budget) for budget in BUDGETS)
    figures.add("needle_torch_within", within, "torch within the engine's interval", "true")


def _agree(rights: Right, budget: int) -> bool:
    """Whether the share of torch lies within the interval of the engine's."""
    served, torch = rights[f"restored_{budget}"], rights[f"torch_restored_{budget}"]
    low, high = wilson(sum(served), len(served))
    return bool(low <= float(np.mean(torch)) <= high)
