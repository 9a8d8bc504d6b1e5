"""Whether a model remembers, and whether it would notice that something stands in a wrong place."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from .recall_language import FACT_TOKENS, SAID, Quiz, make_quiz

BLOCK: Final = 32  # tokens of a splice: the fact is within
_AT_ONCE: Final = 16  # texts that are read together


class Marks(NamedTuple):
    """Answers that were right in all their tokens, of ``n``.

    Attributes:
        plain: With everything in its place.
        misplaced: With the block that holds the fact turned to where it would stand before the
            key's first telling; of keys that were told more than once.
        replaced: With that block turned there and back: what turning alone costs.
        repeated: Of the same questions as ``misplaced``, with everything in its place.
        n_repeated: How many those were.
    """

    plain: int
    n: int
    misplaced: int
    replaced: int
    repeated: int
    n_repeated: int


def examine(model: Any, length: int, facts: int, texts: int, seed: int = 1) -> Marks:
    """Ask each of ``texts`` texts of ``length`` tokens one question."""
    random = np.random.default_rng(seed)
    found = [
        _examine(model, make_quiz(_AT_ONCE, length, facts, 1, random), length)
        for _ in range(-(-texts // _AT_ONCE))
    ]
    return Marks(*(sum(column) for column in zip(*found, strict=True)))


def _examine(model: Any, quiz: Quiz, length: int) -> Marks:
    ids = torch.from_numpy(quiz.ids)
    body = length - FACT_TOKENS
    again = torch.from_numpy(quiz.tellings[:, 0] > 1)
    start = torch.from_numpy(np.minimum(quiz.told_at[:, 0], body - BLOCK))
    first = torch.from_numpy(_first_told(quiz.ids[:, :body], quiz.ids[:, body + 1]))
    away = first - BLOCK - start
    plain = _answers(model, ids, body, start, [torch.zeros_like(away)])
    misplaced = _answers(model, ids, body, start, [away])
    replaced = _answers(model, ids, body, start, [away, -away])
    return Marks(
        int(plain.sum()), len(ids), int(misplaced[again].sum()), int(replaced[again].sum()),
        int(plain[again].sum()), int(again.sum()),
    )  # fmt: skip


def _first_told(body: Any, keys: Any) -> Any:
    """Where each text tells its key first."""
    return np.array([
        np.flatnonzero((row[:-1] == 1) & (row[1:] == key))[0]
        for row, key in zip(body, keys, strict=True)
    ])  # fmt: skip


def _answers(model: Any, ids: Tensor, body: int, start: Tensor, turns: list[Tensor]) -> Tensor:
    """Which texts' answers are right, after a block's keys were turned by each of ``turns``."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :body], past_key_values=cache)
        for layer in cache.layers:
            for turn in turns:
                layer.keys = _turned(model, layer.keys, start, turn)
        logits = model(ids[:, body:], past_key_values=cache).logits
    said = logits[:, -SAID - 1 : -1].argmax(-1)
    return (said == ids[:, -SAID:]).all(1)


def _turned(model: Any, keys: Tensor, start: Tensor, turn: Tensor) -> Tensor:
    """Keys [texts, heads, tokens, dims] with each text's block rotated by its ``turn``."""
    cos, sin = model.model.rotary_emb(keys, turn[:, None])
    slots = (start[:, None] + torch.arange(BLOCK))[:, None, :, None].expand(
        -1, keys.shape[1], -1, keys.shape[3]
    )
    block = keys.gather(2, slots)
    left, right = block.chunk(2, -1)
    turned = block * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]
    return keys.scatter(2, slots, turned)
