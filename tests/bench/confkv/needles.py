"""A made-up code somewhere in a text, asked for at its end: who still knows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ...hooks.transformers.conf_cache import ConfKVCache
from ...hooks.transformers.conf_settings import ConfKVSettings
from ..figures import Figures
from ..teaching.recall_language import SAID, make_quiz
from .confkv_arms import STATIC, confident
from .confkv_texts import haystacks
from .followed import follow, read_at_once
from .small_models import Loaded

_DEPTHS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
_CAUTIOUS: Final = 0.8  # the tau that recovers over-confident failures, by the paper
_ASKING: Final = 96  # tokens that told and asked codes may add to a text
_PROMPT: Final = 64  # tokens that are read at once; the rest is followed, and evicted on the way
_QUIZZES: Final = 96
_NAMES: Final = {"niah_window": "window", "niah_h2o": "h2o"}

Say = Callable[[str], None]
Make = Callable[[], ConfKVCache]


def add_needles(
    figures: Figures, loaded: Loaded, texts: Tensor, it: ConfKVSettings, prefix: str, say: Say
) -> None:
    """The share of codes that each arm says whole, over five depths."""
    model, config = loaded.model, loaded.model.config
    texts = texts[:, :-_ASKING]
    ours, room = _said(loaded, texts, lambda: confident(config, it))
    known, _ = _said(loaded, texts, None)
    figures.add(f"{prefix}niah_full", known, "of codes")
    figures.add(f"{prefix}niah_conf", ours, "of codes", "≥ H2O + 0.08")
    figures.add(f"{prefix}niah_conf_room", room, "tokens a layer")
    careful, more = _said(loaded, texts, lambda: confident(config, replace(it, tau=_CAUTIOUS)))
    figures.add(f"{prefix}niah_cautious", careful, "of codes")
    figures.add(f"{prefix}niah_cautious_room", more, "tokens a layer")
    for name, arm in _NAMES.items():
        static = next(each for each in STATIC if each.name == arm)
        found, _ = _said(loaded, texts, partial(static.cache, config, it, round(room)))
        figures.add(f"{prefix}{name}", found, "of codes")
    say(f"needles of {type(model).__name__}: full {known:.2f}, ours {ours:.2f}")


def add_recalled(figures: Figures, model: Any, length: int, facts: int, say: Say) -> None:
    """The same in the language of recall, at a quarter of the text and less."""
    quiz = make_quiz(_QUIZZES, length, facts, 1, np.random.default_rng(2))
    texts, config = torch.from_numpy(quiz.ids), model.config
    it = ConfKVSettings(low=length // 8, high=length // 4, window=length // 16, slack=8)
    ours = follow(model, texts, _PROMPT, confident(config, it))
    room = round(float(ours.room.mean()))
    rights = {"full": read_at_once(model, texts, _PROMPT)[1], "conf": ours.right}
    for arm in STATIC:
        rights[arm.name] = follow(model, texts, _PROMPT, arm.cache(config, it, room)).right
    for name, right in rights.items():
        share = float(np.mean(right[:, -SAID:].all(1)))
        say(f"recalled, {name}: {share:.3f} with {room} of {length} tokens")
        figures.add(f"recall_niah_{name}", share, f"of answers, {len(texts)} texts")
    figures.add("recall_niah_room", room, f"tokens a layer, of {length}")


def _said(loaded: Loaded, texts: Tensor, make: Make | None) -> tuple[float, float]:
    """The share of codes of which every token was the first choice, and the room that it took.

    Without a cache, nothing is forgotten.
    """
    shares, rooms = [], []
    for number, depth in enumerate(_DEPTHS):
        asked, answer = haystacks(loaded.tokenizer, texts, depth, seed=number)
        if make is None:
            right, room = read_at_once(loaded.model, asked, _PROMPT)[1], np.zeros(1)
        else:
            done = follow(loaded.model, asked, _PROMPT, make())
            right, room = done.right, done.room
        shares.append(float(np.mean(right[:, -answer:].all(1))))
        rooms.append(float(room.mean()))
    return float(np.mean(shares)), float(np.mean(rooms))
