"""A fact that fell out of a session's budget: who still knows it?

The engine serves whole prompts, so its arms differ in what of the text they put into the prompt.
What acts inside of a sequence runs in torch, on the same texts and weights, and so does ours once
more: both must say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvgraph.hooks.calibrate.trials import SplicedModel, joined, part
from kvgraph.hooks.confkv.settings import ConfKVSettings
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.kernels.rope import rope_from_config

from ..confkv.confkv_arms import STATIC, follow
from ..confkv.small_models import load
from ..figures import Figures, at_least
from .needle_texts import ARMS, BUDGETS, LENGTH, Asked, draw
from .recall_language import SAID
from .recall_stage import RECALLS, start

EVICTING: Final = ("h2o", "snapkv")
_READ_AT_ONCE: Final = 32  # tokens; the rest is followed, and evicted on the way


def needles_in_torch(asked: Sequence[Asked]) -> Right:
    """Which answers are right, by arm and budget."""
    model = load(RECALLS).model
    spliced = SplicedModel(model, rope_from_config(model.config, LENGTH))
    restored = {
        f"torch_restored_{budget}": [_answers(spliced, each, budget) for each in asked]
        for budget in BUDGETS
    }
    return restored | _evicting(model, asked)


def _answers(model: SplicedModel, asked: Asked, budget: int) -> bool:
    """Whether the answer is right behind spliced sections, the margin behind them computed."""
    spans = asked.spans("restored", budget)
    if spans:  # else no section fits into the budget
        first, end = spans[-1]
        spans = [*spans[:-1], (first, end - SpliceLimits().margin)]
    states, parts, at = model.states(torch.tensor(asked.body)), [], 0
    for first, end in spans:
        parts.append(model.moved(part(states, first, end), at - first))
        at += end - first
    words = asked.context("restored", budget)[at:]
    rest = torch.tensor([*words, *asked.question, *asked.answer])
    before = joined(parts) if parts else None
    said = model.logits(rest, before)[-SAID - 1 : -1].argmax(-1)
    return bool(said.tolist() == asked.answer)


def _evicting(model: Any, asked: Sequence[Asked]) -> Right:
    texts = torch.tensor([[*each.body, *each.question, *each.answer] for each in asked])
    found: Right = {}
    for arm in (each for each in STATIC if each.name in EVICTING):
        for budget in BUDGETS:
            settings = ConfKVSettings(low=budget, high=budget, window=budget // 4, slack=8)
            done = follow(model, texts, _READ_AT_ONCE, arm.cache(model.config, settings, budget))
            right: list[bool] = np.asarray(done.right[:, -SAID:].all(1)).tolist()
            found[f"{arm.name}_{budget}"] = right
    return found


TIGHT: Final = BUDGETS[1]  # the budget of the figures without a number: 3.6 × less

Say = Callable[[str], None]
Right = dict[str, list[bool]]


def add_needles(figures: Figures, scratch: Path, texts: int, seed: int, say: Say) -> None:
    say("needles on a real engine")
    served = start("needle", True, scratch, count=texts, seed=seed)
    say("needles in torch: the same splices, and caches that evict")
    rights: Right = served["right"] | needles_in_torch(draw(texts, seed))
    for name, right in rights.items():
        figures.add_share(f"needle_{name}", sum(right), len(right), "right")
    figures.add("needle_texts", texts, "texts")
    figures.add("needle_spliced_share", served["spliced"] / served["prompt"], "of prompt tokens")
    _add_verdict(figures, rights)


def _add_verdict(figures: Figures, rights: Right) -> None:
    share = {name: float(np.mean(right)) for name, right in rights.items()}
    ours = share[f"restored_{TIGHT}"]
    others = [*(arm for arm in ARMS if arm != "restored"), *EVICTING]
    best = max(others, key=lambda arm: share[f"{arm}_{TIGHT}"])
    figures.add("needle_recovery", ours, "right at 3.6 ×", at_least(share["full"] - 0.05, 3))
    figures.add("needle_best_other", share[f"{best}_{TIGHT}"], f"right: {best}", "< 0.5")
    pairs = zip(rights[f"restored_{TIGHT}"], rights[f"torch_restored_{TIGHT}"], strict=True)
    same = [mine == theirs for mine, theirs in pairs]
    figures.add("needle_engine_as_torch", float(np.mean(same)), "of texts, right or wrong in both")
