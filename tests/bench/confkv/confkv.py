"""``kvgraph bench confkv``: what the cache keeps, what that costs, and beside whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.layer import ConfLayer
from kvgraph.hooks.confkv.settings import ConfKVSettings
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..figures import Figures, only_errors
from .confkv_arms import (
    STATIC,
    WINDOW,
    Floats,
    Followed,
    follow,
    in_int8,
    read_at_once,
    with_pyramid,
)
from .confkv_texts import documents, windows
from .needles import add_needles, add_pages
from .small_models import TEXT_MODEL, load

Say = Callable[[str], None]

BATCH: Final = 8
_LARGER: Final = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12,
}  # fmt: skip
_LARGER_ROUNDS: Final = 4  # evictions


def eviction_share(
    model: Any, texts: Tensor, prompt: int, make: Callable[[], ConfKVCache]
) -> float:
    """Share of a step that goes into eviction and what is known of tokens, timed in place."""
    cache = make()
    spent, inside = [0.0], [False]
    for layer in [each for each in cache.layers if isinstance(each, ConfLayer)]:
        for name in ("note", "shrink", "arrived"):
            setattr(layer, name, _timed(getattr(layer, name), spent, inside))
    with torch.inference_mode():
        model(texts[:, :prompt], past_key_values=cache)
        spent[0], began = 0.0, time.perf_counter()
        for at in range(prompt, texts.shape[1]):
            model(texts[:, at : at + 1], past_key_values=cache)
        return spent[0] / (time.perf_counter() - began)


def eviction_share_of_a_larger_model() -> float:
    """The same of a Llama of a hundred million parameters with random weights, never sure.

    A small model's step is mostly Python. Texts begin at the high budget, so that tokens are
    evicted throughout.
    """
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**_LARGER)).eval()
    settings = ConfKVSettings()
    steps = _LARGER_ROUNDS * settings.slack
    texts = torch.randint(1, _LARGER["vocab_size"], (BATCH, settings.high + steps))
    return eviction_share(model, texts, settings.high, lambda: ConfKVCache(model.config, settings))


def _timed(
    action: Callable[..., Any], spent: list[float], inside: list[bool]
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if inside[0]:
            return action(*args)
        inside[0], began = True, time.perf_counter()
        try:
            return action(*args)
        finally:
            inside[0] = False
            spent[0] += time.perf_counter() - began

    return run


_BUDGETS: Final = ConfKVSettings(low=64, high=256, window=32, slack=8)
_SEEDS: Final = (1, 2, 3)
_DRAWS: Final = 2_000  # of whole texts: arms are compared on the same ones
LEAST_GAP: Final = 0.05  # nats between window and full; below, there is nothing to close
PARTS: Final = ("all", "text", "needles", "pages", "cost")


@dataclass(frozen=True, slots=True)
class Scale:
    texts: int = 48  # held-out windows; three seeds choose their thirds
    length: int = 1024  # tokens of a window

    @property
    def prompt(self) -> int:
        """Tokens of a window that are read at once."""
        return self.length // 4


FULL: Final = Scale()
QUICK: Final = Scale(texts=6, length=384)


def run(progress: bool, part: str, scale: Scale, model: Path | None, text: Path | None) -> Figures:
    say = Console(stderr=True, quiet=not progress).print
    figures, parts = Figures("confkv"), PARTS if part == "all" else (part,)
    with only_errors():
        loaded = load(model or TEXT_MODEL)
        found, each = documents(text), max(1, scale.texts // len(_SEEDS))
        drawn = [windows(loaded.tokenizer, found, each, scale.length, seed) for seed in _SEEDS]
        texts = torch.cat(drawn)
        if "text" in parts:
            _add_perplexity(figures, Perplexity(loaded.model, texts, scale.prompt, _BUDGETS, say))
        if "needles" in parts:
            add_needles(figures, loaded, texts, _BUDGETS, say)
        if "pages" in parts:
            add_pages(figures, loaded, _BUDGETS, say)
        if "cost" in parts:
            config = loaded.model.config
            share = eviction_share(
                loaded.model, texts[:8], scale.prompt, lambda: ConfKVCache(config, _BUDGETS)
            )
            figures.add("eviction_share", share, "of a step, batch 8", "≤ 0.05")
            share = eviction_share_of_a_larger_model()
            figures.add("eviction_share_100m", share, "of a step, batch 8", "≤ 0.05")
    return figures


@dataclass
class Perplexity:
    """How much of what a window forgets each arm remembers, at the same memory."""

    model: Any
    texts: Tensor  # [texts, tokens]
    prompt: int  # tokens that are read at once
    settings: ConfKVSettings
    say: Say
    surprise: dict[str, Floats] = field(default_factory=dict)  # of each arm, mean nats of each text
    room: dict[str, float] = field(default_factory=dict)  # of each arm, the mean that a layer took

    def run(self) -> int:
        """Read the texts by each arm; the most bytes that ours allocated."""
        it, config = self.settings, self.model.config
        nats, _ = read_at_once(self.model, self.texts, self.prompt)
        self._note("full", nats, float(self.texts.shape[1]))
        ours = self._follow("ours", ConfKVCache(config, it))
        self._follow("ours_same_int8", ConfKVCache(config, replace(it, int8=True)))
        self._follow("ours_int8", ConfKVCache(config, in_int8(it)))
        self._follow("ours_l", ConfKVCache(config, with_pyramid(in_int8(it))))
        for arm in STATIC:
            self._follow(arm.name, arm.cache(config, it, round(float(ours.room.mean()))))
        return ours.peak

    def closed(self, arm: str) -> list[float]:
        """The share of the gap that an arm closes, resampled; 0 where a draw has no gap."""
        window, lost = self.resampled("window"), self.lost()
        with np.errstate(divide="ignore", invalid="ignore"):
            closed = (window - self.resampled(arm)) / lost
        return np.where(lost > 0, closed, 0.0).tolist()  # type: ignore[no-any-return]  # numpy's

    def lost(self) -> Floats:
        return self.resampled("window") - self.resampled("full")

    def resampled(self, arm: str) -> Floats:
        texts = len(self.texts)
        index = np.random.default_rng(18).integers(0, texts, size=(_DRAWS, texts))
        return np.asarray(self.surprise[arm][index].mean(1))

    def _follow(self, name: str, cache: ConfKVCache) -> Followed:
        done = follow(self.model, self.texts, self.prompt, cache)
        self._note(name, done.surprise, float(done.room.mean()))
        return done

    def _note(self, name: str, nats: Floats, room: float) -> None:
        self.surprise[name], self.room[name] = nats.mean(1), room
        self.say(f"{name}: {nats.mean():.4f} nats, {room:.1f} tokens a layer")


def _add_perplexity(figures: Figures, arms: Perplexity) -> None:
    peak = arms.run()
    figures.add("window_gap", list(arms.lost()), "nats", f"≥ {LEAST_GAP}")
    for name in arms.surprise:
        figures.add(f"room_{name}", arms.room[name], "tokens a layer")
        if name not in ("full", "window"):
            figures.add(f"gap_{name}", arms.closed(name), "of window → full")
    figures.add("gap_closed_int8", arms.closed("ours_int8"), "of window → full")
    figures.add("gap_closed_l", arms.closed("ours_l"), "of window → full")
    gaps = {name: each.value for name, each in figures.figures.items()}
    best = max(
        (arm.name for arm in STATIC if arm.name != "window"), key=lambda name: gaps[f"gap_{name}"]
    )
    figures.add("best_static_gap", arms.closed(best), f"of window → full: {best}")
    cost = gaps["gap_ours"] - gaps["gap_ours_same_int8"]
    figures.add("int8_cost", cost, "of window → full, the same tokens")
    wide = replace(arms.settings, low=arms.settings.high)
    window = ConfKVCache(arms.model.config, wide, ranker=WINDOW)
    ratio = peak / follow(arms.model, arms.texts, arms.prompt, window).peak
    figures.add("peak_ratio", ratio, "× a window of the high budget", "≤ 1.3")
