"""A made-up code somewhere in a text, asked for at its end: who still knows it.

Asked in the prompt, the question is read with the text, before anything is evicted, as prompts of
the field's needle tests are. Asked later, all that the text holds was evicted by then. A code is
judged token by token, each behind what is right; its first is a space where words are few, and left
aside.
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
from ..teaching.recall_language import SAID, make_quiz
from .confkv_arms import STATIC, confident, follow, read_at_once
from .confkv_texts import Told, haystacks, told_codes
from .resampled import wilson
from .small_models import Loaded

LENGTHS: Final = (256, 512, 1024)  # of the text, told and asked codes within
_DEPTHS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
_CAUTIOUS: Final = 0.8  # the tau that recovers over-confident failures, by the paper
_ASKING: Final = 96  # tokens that told and asked codes may add to a text
_PROMPT: Final = 64  # asked later, so much is read at once, and the rest token by token
_QUIZZES: Final = 96
_NAMES: Final = ("window", "h2o", "snapkv")

Say = Callable[[str], None]
Make = Callable[[], ConfKVCache]


class Said(NamedTuple):
    """Tokens of codes that were said right, of ``n``, and those that a layer held meanwhile."""

    right: int
    n: int
    room: float


def add_needles(
    figures: Figures, loaded: Loaded, texts: Tensor, it: ConfKVSettings, prefix: str, say: Say
) -> None:
    """The share of codes' digits that each arm says, over lengths and five depths."""
    config = loaded.model.config
    _add_said(figures, f"{prefix}niah_full", said(loaded, texts, None))
    ours = said(loaded, texts, lambda: confident(config, it))
    _add_said(figures, f"{prefix}niah_conf", ours, "≥ H2O + 0.08")
    figures.add(f"{prefix}niah_conf_room", ours.room, "tokens a layer")
    careful = said(loaded, texts, lambda: confident(config, replace(it, tau=_CAUTIOUS)))
    _add_said(figures, f"{prefix}niah_cautious", careful)
    figures.add(f"{prefix}niah_cautious_room", careful.room, "tokens a layer")
    for name in _NAMES:
        static = next(each for each in STATIC if each.name == name)
        make = partial(static.cache, config, it, round(ours.room))
        _add_said(figures, f"{prefix}niah_{name}", said(loaded, texts, make))
    say(f"digits: ours {ours.right} of {ours.n} at {ours.room:.0f} tokens a layer")


def _add_said(figures: Figures, name: str, found: Said, target: str = "") -> None:
    low, high = wilson(found.right, found.n)
    figures.add(name, found.right / found.n, f"of digits, {low:.3f} – {high:.3f}", target)


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


def add_recalled(figures: Figures, model: Any, length: int, facts: int, say: Say) -> None:
    """The same in the language of recall, at a quarter of the text and less."""
    quiz = make_quiz(_QUIZZES, length, facts, 1, np.random.default_rng(2))
    texts = torch.from_numpy(quiz.ids)
    for how, prompt in (("", length - SAID), ("later_", _PROMPT)):
        _add_recalled(figures, model, texts, prompt, f"recall_niah_{how}", say)


def _add_recalled(
    figures: Figures, model: Any, texts: Tensor, prompt: int, name: str, say: Say
) -> None:
    length, config = texts.shape[1], model.config
    it = ConfKVSettings(low=length // 8, high=length // 4, window=length // 16, slack=8)
    ours = follow(model, texts, prompt, confident(config, it))
    room = round(float(ours.room.mean()))
    rights = {"full": read_at_once(model, texts, prompt)[1], "conf": ours.right}
    for arm in STATIC:
        rights[arm.name] = follow(model, texts, prompt, arm.cache(config, it, room)).right
    for arm_name, right in rights.items():
        share = float(np.mean(right[:, -SAID:].all(1)))
        say(f"{name}{arm_name}: {share:.3f} with {room} of {length} tokens")
        figures.add(f"{name}{arm_name}", share, f"of answers, {len(texts)} texts")
    figures.add(f"{name}room", room, f"tokens a layer, of {length}")


STEPS: Final = 30
_ASKED_EVERY: Final = 4  # a step in four reads an older page again and asks for its code
_AGENTS: Final = 16  # in a batch, each with codes of its own
_SEEDS: Final = (1, 2, 3)


class Walk(NamedTuple):
    right: Tensor  # bool [agents, questions, tokens of a code behind its first]
    peak: int  # bytes of keys and values, the most at once
    tokens: int  # of each agent's whole text


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
