"""The arms of the bench: each says how many tokens stay, and who goes first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.layer import Ranker, mean_of_queries
from kvgraph.hooks.confkv.settings import ConfKVSettings
from numpy.typing import NDArray
from torch import Tensor

_EVERY_QUERY: Final = 1 << 30
_HISTORY: Final = 400  # steps that Scissorhands remembers, as in its paper
_OBSERVED: Final = 32  # queries that SnapKV looks at, as in its paper
_POOLED: Final = 7  # neighbours that SnapKV takes the mean of, likewise
_SINKS: Final = 4  # first tokens that StreamingLLM keeps


class _Blind:
    """Remembers nothing of attention."""

    __slots__ = ()

    def first(self, mass: Tensor) -> Tensor:
        return mass[:, -1] * 0.0

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        return memory


@dataclass(frozen=True, slots=True)
class Window(_Blind):
    """The newest tokens stay, and with ``sinks`` the first of the text (StreamingLLM)."""

    sinks: int = 0
    queries: int = 1

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        score = position.to(torch.float32)
        return score.masked_fill(position < self.sinks, torch.inf)


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """H2O: the tokens that were paid the most attention since the start."""

    queries: int = _EVERY_QUERY

    def first(self, mass: Tensor) -> Tensor:
        return mass.sum(1)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        return memory + mass

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        return memory


@dataclass(frozen=True, slots=True)
class Scissorhands:
    """The tokens that were most often paid more than their equal share, lately."""

    queries: int = _HISTORY

    def first(self, mass: Tensor) -> Tensor:
        return (mass * mass.shape[2] > 1.0).float().sum(1)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        return memory * (1.0 - 1.0 / _HISTORY) + (mass * mass.shape[1] > 1.0).float()

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        return memory


@dataclass(frozen=True, slots=True)
class SnapKV:
    """The tokens in whose neighbourhood the last queries looked; PyramidKV with falling budgets."""

    queries: int = _OBSERVED

    def first(self, mass: Tensor) -> Tensor:
        return mean_of_queries(mass)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        return memory.lerp(mass, 1.0 / _OBSERVED)

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        pooled = torch.nn.functional.avg_pool1d(
            memory[:, None], _POOLED, stride=1, padding=_POOLED // 2
        )
        return pooled[:, 0]


WINDOW = Window()


_STEEP: Final = 0.4  # how much a pyramid's first layer has above the mean


@dataclass(frozen=True, slots=True)
class StaticArm:
    """A budget that is always the same."""

    name: str
    ranker: Ranker
    # share of the budget that the newest tokens have for certain; None: the window
    recent: float | None = None
    pyramid: float = 0.0

    def cache(self, config: Any, it: ConfKVSettings, budget: int) -> ConfKVCache:
        """A cache with about ``budget`` tokens a layer, the slack counted by its mean."""
        least = it.window + it.slack
        budget = max(least + (least // 2 if self.pyramid else 0), budget - it.slack // 2)
        window = it.window
        if self.recent is not None:
            window = max(1, min(budget - it.slack, round(self.recent * budget)))
        pyramid = min(self.pyramid, 1.0 - least / budget)
        settings = replace(it, low=budget, high=budget, window=window, int8=False, pyramid=pyramid)
        return ConfKVCache(config, settings, ranker=self.ranker)


STATIC: Final = (
    StaticArm("window", WINDOW),
    StaticArm("streaming", Window(_SINKS)),
    StaticArm("h2o", HeavyHitters(), recent=0.5),
    StaticArm("scissorhands", Scissorhands()),
    StaticArm("snapkv", SnapKV()),
    StaticArm("pyramidkv", SnapKV(), pyramid=_STEEP),
)


def in_int8(it: ConfKVSettings) -> ConfKVSettings:
    """Settings with int8 that hold about as many bytes: half a token each behind the window."""
    return replace(it, int8=True, low=2 * it.low - it.window, high=2 * it.high - it.window)


def with_pyramid(it: ConfKVSettings) -> ConfKVSettings:
    """Settings with falling budgets, as steep as the last layer's window allows."""
    steep = min(_STEEP, 1.0 - (it.window + it.slack) / it.low)
    return replace(it, pyramid=steep)


Floats = NDArray[np.float64]


class Followed(NamedTuple):
    surprise: Floats  # [texts, tokens behind the prompt], nats
    right: NDArray[np.bool_]  # bool, the same shape: whether the token was the model's first choice
    # [tokens behind the prompt], what a layer held on average, in tokens of two bytes a number:
    # one in int8 counts half
    room: Floats
    peak: int  # bytes of keys and values, allocated at once


def follow(model: Any, texts: Tensor, prompt: int, cache: ConfKVCache) -> Followed:
    """Read ``prompt`` tokens of the texts [texts, tokens] at once and the rest one by one."""
    surprise, right, room, peak = [], [], [], 0
    with torch.inference_mode():
        logits = model(texts[:, :prompt], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        for at in range(prompt, texts.shape[1]):
            nats, first = _judged(logits, texts[:, at])
            surprise.append(nats)
            right.append(first)
            room.append(cache.room())
            peak = max(peak, cache.bytes())
            if at + 1 < texts.shape[1]:
                logits = model(texts[:, at : at + 1], past_key_values=cache).logits[:, -1]
    return Followed(np.stack(surprise, 1), np.stack(right, 1), np.array(room), peak)


def read_at_once(model: Any, texts: Tensor, prompt: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Surprise and first choices with nothing forgotten: one pass over the texts."""
    with torch.inference_mode():
        logits = model(texts, use_cache=False).logits[:, prompt - 1 : -1]
    nats, first = _judged(logits.flatten(0, 1), texts[:, prompt:].flatten())
    shape = (texts.shape[0], texts.shape[1] - prompt)
    return nats.reshape(shape), first.reshape(shape)


def _judged(logits: Tensor, target: Tensor) -> tuple[Floats, NDArray[np.bool_]]:
    nats = torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")
    return nats.double().numpy(), (logits.argmax(-1) == target).numpy()
