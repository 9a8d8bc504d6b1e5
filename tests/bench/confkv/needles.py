"""A made-up code somewhere in a text, asked for at its end: who still knows it.

The question is read with the text, before anything is evicted, as in the field's needle tests. A
code is judged token by token, each behind what is right; its first is a space where words are few,
and left aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.settings import ConfKVSettings
from torch import Tensor
from transformers import DynamicCache

from ..figures import Figures
from .confkv_arms import STATIC, follow, read_at_once
from .confkv_texts import Told, haystacks, told_codes
from .small_models import Loaded

LENGTHS: Final = (256, 512, 1024)  # of the text, told and asked codes within
_DEPTHS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
_CAUTIOUS: Final = 0.8  # the tau that recovers over-confident failures, by the paper
_ASKING: Final = 96  # tokens that told and asked codes may add to a text
_NAMES: Final = ("window", "h2o", "snapkv")

Say = Callable[[str], None]
Make = Callable[[], ConfKVCache]


class Said(NamedTuple):
    """Tokens of codes that were said right, of ``n``, and those that a layer held meanwhile."""

    right: int
    n: int
    room: float


def add_needles(
    figures: Figures, loaded: Loaded, texts: Tensor, it: ConfKVSettings, say: Say
) -> None:
    """The share of codes' digits that each arm says, over lengths and five depths."""
    config = loaded.model.config
    _add_said(figures, "niah_full", said(loaded, texts, None))
    ours = said(loaded, texts, lambda: ConfKVCache(config, it))
    _add_said(figures, "niah_conf", ours, "≥ H2O + 0.08")
    figures.add("niah_conf_room", ours.room, "tokens a layer")
    careful = said(loaded, texts, lambda: ConfKVCache(config, replace(it, tau=_CAUTIOUS)))
    _add_said(figures, "niah_cautious", careful)
    figures.add("niah_cautious_room", careful.room, "tokens a layer")
    for name in _NAMES:
        static = next(each for each in STATIC if each.name == name)
        make = partial(static.cache, config, it, round(ours.room))
        _add_said(figures, f"niah_{name}", said(loaded, texts, make))
    say(f"digits: ours {ours.right} of {ours.n} at {ours.room:.0f} tokens a layer")


def _add_said(figures: Figures, name: str, found: Said, target: str = "") -> None:
    figures.add_share(name, found.right, found.n, "of digits", target)


def said(loaded: Loaded, texts: Tensor, make: Make | None) -> Said:
    """Ask for a code in each text at each length and depth; with no cache, nothing is forgotten."""
    right, n, rooms = 0, 0, []
    for length in (each for each in LENGTHS if each <= texts.shape[1]):
        for number, depth in enumerate(_DEPTHS):
            asked, answer = haystacks(loaded.tokenizer, texts[:, : length - _ASKING], depth, number)
            prompt = asked.shape[1] - answer
            if make is None:
                found, room = read_at_once(loaded.model, asked, prompt)[1], np.zeros(1)
            else:
                done = follow(loaded.model, asked, prompt, make())
                found, room = done.right, done.room
            judged = found[:, 1:]
            right, n = right + int(judged.sum()), n + judged.size
            rooms.append(float(room.mean()))
    return Said(right, n, float(np.mean(rooms)))


STEPS: Final = 30
_ASKED_EVERY: Final = 4  # a step in four reads an older page again and asks for its code
_AGENTS: Final = 16  # in a batch, each with codes of its own
_SEEDS: Final = (1, 2, 3)


class Walk(NamedTuple):
    right: Tensor  # bool [agents, questions, tokens of a code behind its first]
    peak: int  # bytes of keys and values, the most at once
    tokens: int  # of each agent's whole text


def add_pages(figures: Figures, loaded: Loaded, it: ConfKVSettings, say: Say) -> None:
    """Right answers of ours over those with nothing forgotten, and bytes the other way round."""
    success, peaks = [], []
    for seed in _SEEDS:
        pages = told_codes(loaded.tokenizer, _AGENTS * STEPS, seed)
        plain = walk(loaded.model, pages, DynamicCache(config=loaded.model.config), _plain_bytes)
        ours = walk(loaded.model, pages, ConfKVCache(loaded.model.config, it), _our_bytes)
        success.append(float(ours.right.sum()) / max(1.0, float(plain.right.sum())))
        peaks.append(plain.peak / ours.peak)
        share = float(plain.right.double().mean())
        say(f"agents, {plain.tokens} tokens: full {share:.3f}, ours {success[-1]:.3f} of that")
        figures.add(f"agent_full_{seed}", share, "of digits")
    figures.add("agent_success_ratio", success, "of full, seeds", "≥ 0.95")
    figures.add("agent_peak_ratio", peaks, "full / ours, bytes, seeds", "≥ 2.5")


def walk(model: Any, pages: Told, cache: Any, size: Callable[[Any], int]) -> Walk:
    """Let all agents take their steps together; ``pages`` has ``STEPS`` for each."""
    agents = len(pages.told) // STEPS
    told, question, answer = (part.reshape(STEPS, agents, -1) for part in pages)
    random, right, peak, tokens = np.random.default_rng(1), [], 0, 0
    with torch.inference_mode():
        for step in range(STEPS):
            parts = [told[step]]
            if asks := step % _ASKED_EVERY == _ASKED_EVERY - 1:
                page = int(random.integers(0, step))
                parts = [told[page], question[page]]
            logits = model(torch.cat(parts, 1), past_key_values=cache).logits[:, -1]
            tokens += sum(part.shape[1] for part in parts)
            if asks:
                right.append(_says(model, cache, logits, answer[page]))
                tokens += answer.shape[2]
            peak = max(peak, size(cache))
    return Walk(torch.stack(right, 1), peak, tokens)


def _says(model: Any, cache: Any, logits: Tensor, answer: Tensor) -> Tensor:
    """Which first choices are what the codes say, [agents, tokens behind the first]."""
    right = []
    for token in answer.T:
        right.append(logits.argmax(-1) == token)
        logits = model(token[:, None], past_key_values=cache).logits[:, -1]
    return torch.stack(right[1:], 1)


def _plain_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _our_bytes(cache: Any) -> int:
    return int(cache.bytes())
