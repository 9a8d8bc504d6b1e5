"""How much of what a window forgets each arm remembers, at the same memory, on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.settings import ConfKVSettings
from torch import Tensor

from ..figures import Figures
from .confkv_arms import (
    STATIC,
    WINDOW,
    Floats,
    Followed,
    coarse,
    confident,
    follow,
    in_int8,
    read_at_once,
    replayed,
    victims,
    with_pyramid,
)
from .resampled import apart, difference, gap_closed

LEAST_GAP: Final = 0.05  # nats between window and full; below, there is nothing to close

Say = Callable[[str], None]


@dataclass
class Perplexity:
    model: Any
    texts: Tensor  # [texts, tokens]
    prompt: int  # tokens that are read at once
    settings: ConfKVSettings
    say: Say
    surprise: dict[str, Floats] = field(default_factory=dict)  # of each arm, mean nats of each text
    # of each arm, the mean room that a layer took
    room: dict[str, float] = field(default_factory=dict)
    # of each arm, the most bytes that were allocated
    peak: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        it, config = self.settings, self.model.config
        nats, _ = read_at_once(self.model, self.texts, self.prompt)
        self._note("full", nats, float(self.texts.shape[1]), 0)
        ours = self._follow("ours", confident(config, it))
        self._follow("ours_same_int8", confident(config, _int8(it)))
        with coarse():
            self._follow("ours_same_int4", confident(config, _int8(it)))
        self._follow("ours_int8", confident(config, in_int8(it)))
        self._follow("ours_l", confident(config, with_pyramid(in_int8(it))))
        budget = round(float(ours.room.mean()))
        for arm in STATIC:
            self._follow(arm.name, arm.cache(config, it, budget))

    def isolate(self, seed: int) -> None:
        """The schedule of ours again, with other victims."""
        schedule = self._schedule
        for name, ranker in victims(self.settings, seed).items():
            cache = replayed(self.model.config, self.settings, schedule, ranker)
            self._follow(f"victims_{name}", cache)

    def add_to(self, figures: Figures, prefix: str) -> None:
        full, window = self.surprise["full"], self.surprise["window"]
        lost = difference(window, full)
        figures.add(f"{prefix}window_gap", list(lost), "nats", f"≥ {LEAST_GAP}")
        for name in self.surprise:
            figures.add(f"{prefix}room_{name}", self.room[name], "tokens a layer")
            if name not in ("full", "window"):
                figures.add(f"{prefix}gap_{name}", self.closed(name), "of window → full")

    def closed(self, arm: str) -> list[float]:
        """The share of the gap that an arm closes, resampled; 0 where a draw has no gap."""
        found = gap_closed(self.surprise["window"], self.surprise[arm], self.surprise["full"])
        return list(np.nan_to_num(found, nan=0.0))

    def median(self, arm: str) -> float:
        return float(np.median(self.closed(arm)))

    def peak_ratio(self) -> float:
        """The most bytes of ours over those of a window as large as the high budget."""
        high = max(self.settings.high, 1)
        wide = replace(self.settings, low=high)
        cache = ConfKVCache(self.model.config, wide, ranker=WINDOW)
        return self.peak["ours"] / follow(self.model, self.texts, self.prompt, cache).peak

    def order(self) -> tuple[bool, bool]:
        """Whether the victims' arms stand in the paper's order, and whether intervals agree."""
        rows = [self.surprise[f"victims_{name}"] for name in victims(self.settings, 0)]
        pairs = list(pairwise(rows))
        return (
            all(float(worse.mean()) > float(better.mean()) for worse, better in pairs),
            all(apart(worse, better) for worse, better in pairs),
        )

    def _follow(self, name: str, cache: ConfKVCache) -> Followed:
        done = follow(self.model, self.texts, self.prompt, cache)
        if name == "ours":
            self._schedule = cache.schedule()
        self._note(name, done.surprise, float(done.room.mean()), done.peak)
        return done

    def _note(self, name: str, nats: Floats, room: float, peak: int) -> None:
        self.surprise[name], self.room[name], self.peak[name] = nats.mean(1), room, peak
        self.say(f"{name}: {nats.mean():.4f} nats, {room:.1f} tokens a layer")


def _int8(it: ConfKVSettings) -> ConfKVSettings:
    return replace(it, int8=True)
