"""The needle experiment without an engine: our splices, and rivals that act inside of a sequence.

Same weights, same texts: caches that evict for good (H2O, SnapKV), caches that read back (InfLLM,
ArkVale), and our own splices once more, which must say what the engine says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvgraph.hooks.calibrate.trials import SplicedModel, joined, part
from kvgraph.hooks.confkv.settings import ConfKVSettings
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.kernels.rope import rope_from_config

from ..confkv.confkv_arms import STATIC
from ..confkv.followed import follow
from ..confkv.small_models import load
from ..teaching.recall_language import SAID
from .landings import distances
from .needle_texts import BUDGETS, LENGTH, Asked, Span
from .recalling_rivals import RECALLING, RecallingModel

EVICTING: Final = ("h2o", "snapkv")
LANDINGS: Final = ("front", "tail", "original", "edge", "beyond")
_READ_AT_ONCE: Final = 32  # tokens; the rest is followed, and evicted on the way

Right = dict[str, list[bool]]


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
