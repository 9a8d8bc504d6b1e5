"""A stand-in for an agent: thirty steps, each of which reads a page, and some ask for what it says.

A page tells a made-up code. Before it needs one, the agent reads that page again, as agents do; its
answer is judged token by token, each behind what is right, the first (often a space) aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from kvgraph.hooks.confkv.settings import ConfKVSettings
from torch import Tensor
from transformers import DynamicCache

from ...figures import Figures
from ..confkv_arms import confident
from ..confkv_texts import Told, told_codes
from ..small_models import Loaded

STEPS: Final = 30
_ASKED_EVERY: Final = 4  # a step in four reads an older page again and asks for its code
_AGENTS: Final = 16  # in a batch, each with codes of its own
_SEEDS: Final = (1, 2, 3)

Say = Callable[[str], None]


class Walk(NamedTuple):
    """What a batch of agents did.

    Attributes:
        right: bool [agents, questions, tokens of a code behind its first].
        peak: Bytes of keys and values, the most at once.
        tokens: Of each agent's whole text.
    """

    right: Tensor
    peak: int
    tokens: int


def add_pages(figures: Figures, loaded: Loaded, it: ConfKVSettings, prefix: str, say: Say) -> None:
    """Right answers of ours over those with nothing forgotten, and bytes the other way round."""
    success, peaks = [], []
    for seed in _SEEDS:
        pages = told_codes(loaded.tokenizer, _AGENTS * STEPS, seed)
        plain = walk(loaded.model, pages, DynamicCache(config=loaded.model.config), _plain_bytes)
        ours = walk(loaded.model, pages, confident(loaded.model.config, it), _our_bytes)
        success.append(float(ours.right.sum()) / max(1.0, float(plain.right.sum())))
        peaks.append(plain.peak / ours.peak)
        share = float(plain.right.double().mean())
        say(f"agents, {plain.tokens} tokens: full {share:.3f}, ours {success[-1]:.3f} of that")
        figures.add(f"{prefix}agent_full_{seed}", share, "of digits")
    figures.add(f"{prefix}agent_success_ratio", success, "of full, seeds", "≥ 0.95")
    figures.add(f"{prefix}agent_peak_ratio", peaks, "full / ours, bytes, seeds", "≥ 2.5")


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
