"""One setting at a time: what it costs, what it holds, and what follows a confident mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from kvgraph.hooks.confkv.settings import ConfKVSettings
from torch import Tensor

from ..figures import Figures
from .confkv_arms import confident
from .followed import Floats, Followed, follow, read_at_once

_SURE: Final = 0.7  # a mistake is confident from here, whatever tau is
_AFTER: Final = 16  # tokens behind a confident mistake that it is judged by; chosen
_TAUS: Final = (0.5, 0.6, 0.7, 0.8, 0.9)
_ALPHAS: Final = (0.0, 0.5, 0.9, 1.0)
_GAMMAS: Final = (0.5, 0.9, 0.97, 0.99)

Say = Callable[[str], None]


def points(it: ConfKVSettings) -> dict[str, ConfKVSettings]:
    """The settings of the sweep by name; each differs from ``it`` in one of them."""
    least = it.window + it.slack
    lows = sorted({max(least, it.low * share // 4) for share in (3, 4, 6, 8)})
    windows = (it.window // 2, it.window, it.low - it.slack)
    return {
        **{f"tau_{tau}": replace(it, tau=tau) for tau in _TAUS},
        **{f"low_{low}": replace(it, low=low) for low in lows},
        **{f"window_{window}": replace(it, window=window) for window in windows},
        **{f"alpha_{alpha}": replace(it, alpha=alpha) for alpha in _ALPHAS},
        **{f"gamma_{gamma}": replace(it, gamma=gamma) for gamma in _GAMMAS},
    }


def add_sweeps(
    figures: Figures, model: Any, texts: Tensor, prompt: int, it: ConfKVSettings, prefix: str,
    say: Say,
) -> None:  # fmt: skip
    """For each point: nats above a full cache, tokens held, and nats behind confident mistakes."""
    full, _ = read_at_once(model, texts, prompt)
    for name, settings in points(it).items():
        done = follow(model, texts, prompt, confident(model.config, settings))
        lost, room = (done.surprise - full).mean(1), float(done.room.mean())
        figures.add(f"{prefix}sweep_{name}", list(lost), "nats above full, texts")
        figures.add(f"{prefix}sweep_{name}_room", room, "tokens a layer")
        say(f"{name}: {lost.mean():+.4f} nats, {room:.0f} tokens a layer")
        if name.startswith("tau"):
            share, behind = mistakes(done, full)
            figures.add(f"{prefix}mistakes_{name}", behind, "nats above full behind mistakes")
            figures.add(f"{prefix}mistakes_share", share, "of steps: sure, and wrong")


def mistakes(done: Followed, full: Floats) -> tuple[float, float]:
    """The share of steps that were sure and wrong, and what is lost on the tokens behind them."""
    wrong = (done.confidence[:, : done.right.shape[1]] >= _SURE) & ~done.right
    behind = np.zeros_like(wrong)
    for offset in range(1, _AFTER + 1):
        behind[:, offset:] |= wrong[:, :-offset]
    lost = (done.surprise - full)[behind]
    return float(wrong.mean()), float(lost.mean()) if lost.size else 0.0
