"""A fact that fell out of a session's budget: who still knows it?

The engine serves whole prompts, so its arms differ in what of the text they put into the prompt.
What acts inside of a sequence runs in torch, on the same texts and weights, and so does ours once
more: both must say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvgraph.hooks.calibrate.trials import SplicedModel, joined, part
from kvgraph.hooks.confkv.settings import ConfKVSettings
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.kernels.rope import rope_from_config

from ..confkv.confkv_arms import STATIC, follow
from ..confkv.resampled import wilson
from ..confkv.small_models import load, shipped
from ..figures import Figures
from ..teaching.recall_language import SAID
from .needle_texts import ARMS, BUDGETS, LENGTH, Asked, Span, add_places, add_right, distances, draw
from .recall_stage import start
from .recalling_rivals import RECALLING, RecallingModel

EVICTING: Final = ("h2o", "snapkv")
LANDINGS: Final = ("front", "tail", "original", "edge", "beyond")
_READ_AT_ONCE: Final = 32  # tokens; the rest is followed, and evicted on the way


def needles_in_torch(folder: Path, asked: Sequence[Asked]) -> Right:
    """Which answers are right, by arm and budget."""
    model = load(folder).model
    return _restored(_spliced(model), asked) | _evicting(model, asked) | _recalling(model, asked)


def landings_in_torch(folder: Path, asked: Sequence[Asked]) -> Right:
    """Which answers are right, by where the sections that name what is asked come back.

    ``original`` leaves a gap where sections are missing; ``edge`` is as far from the question as
    the model was taught, ``beyond`` twice as far.
    """
    model = _spliced(load(folder).model)
    return {
        where: [_answers_at(model, each, distances(each, where)) for each in asked]
        for where in LANDINGS
    }


def _spliced(model: Any) -> SplicedModel:
    return SplicedModel(model, rope_from_config(model.config, LENGTH))


def _restored(model: SplicedModel, asked: Sequence[Asked]) -> Right:
    return {
        f"torch_restored_{budget}": [_answers(model, each, budget) for each in asked]
        for budget in BUDGETS
    }


def _answers(model: SplicedModel, asked: Asked, budget: int) -> bool:
    """Whether the answer is right behind spliced sections, the margin behind them computed."""
    spans = _without_margin(asked.spans("restored", budget))
    states, parts, at = model.states(torch.tensor(asked.body)), [], 0
    for first, end in spans:
        parts.append(model.moved(part(states, first, end), at - first))
        at += end - first
    return _is_said(model, parts, asked.context("restored", budget)[at:], asked)


def _answers_at(model: SplicedModel, asked: Asked, placed: Iterable[tuple[Span, int]]) -> bool:
    """The same for sections that begin so far before the question, with no margin."""
    spans = list(placed)
    states, end = model.states(torch.tensor(asked.body)), sum(b - a for (a, b), _ in spans)
    parts = [
        model.moved(part(states, first, last), end - distance - first)
        for (first, last), distance in spans
    ]
    return _is_said(model, parts, [], asked)


def _is_said(model: SplicedModel, parts: Sequence[Any], words: list[int], asked: Asked) -> bool:
    rest = torch.tensor([*words, *asked.question, *asked.answer])
    before = joined(parts) if parts else None
    said = model.logits(rest, before)[-SAID - 1 : -1].argmax(-1)
    return bool(said.tolist() == asked.answer)


def _without_margin(spans: Sequence[Span]) -> list[Span]:
    if not spans:
        return []  # no section fits into the budget
    first, end = spans[-1]
    return [*spans[:-1], (first, end - SpliceLimits().margin)]


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


def _recalling(model: Any, asked: Sequence[Asked]) -> Right:
    reader = RecallingModel(model, rope_from_config(model.config, LENGTH))
    found: Right = {f"{arm.name}_{budget}": [] for arm in RECALLING for budget in BUDGETS}
    for each in asked:
        text, followed = reader.read(each.body), [*each.question, *each.answer[:-1]]
        for arm in RECALLING:
            for budget in BUDGETS:
                said = reader.follow(text, followed, arm, budget)[-SAID:]
                found[f"{arm.name}_{budget}"].append(said == each.answer)
    return found


TEXTS: Final = 60
TIGHT: Final = BUDGETS[1]  # the budget of the figures without a number: 3.6 × less

Say = Callable[[str], None]
Right = dict[str, list[bool]]


def add_needles(figures: Figures, scratch: Path, texts: int, seed: int, say: Say) -> None:
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
