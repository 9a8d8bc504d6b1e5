"""A language in which remembering can be measured, and in which order matters.

A text is noise with facts in it: ``FACT key v v v``. It ends with questions: ``ASK key v v v``. The
same key is told up to three times with other values, and what was told last is right: whoever mixes
up what stood where answers with an older value. All of it is drawn from 256 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

SIZE: Final = 256
FACT, ASK = 1, 2
KEYS: Final = (16, 80)
VALUES: Final = (80, 208)
NOISE: Final = (208, 256)
SAID: Final = 3  # value tokens of a fact
FACT_TOKENS: Final = 2 + SAID
_TELLINGS: Final = 3  # of one key, at most

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quiz:
    # [texts, tokens]; the last ``questions * FACT_TOKENS`` are questions with their answers
    ids: Ids
    answered: NDArray[np.bool_]  # bool [texts, tokens]: tokens that are part of an answer
    told_at: Ids  # [texts, questions], where the fact that answers begins
    tellings: Ids  # [texts, questions], how often the key was told


def make_quiz(
    texts: int, tokens: int, facts: int, questions: int, random: np.random.Generator
) -> Quiz:
    body = tokens - questions * FACT_TOKENS
    if facts * FACT_TOKENS > body:
        raise ValueError(f"{facts} facts do not fit into {body} tokens")
    rows = [_draw(body, facts, questions, random) for _ in range(texts)]
    ids, told, tellings = (np.stack(column) for column in zip(*rows, strict=True))
    answered = np.zeros(ids.shape, dtype=bool)
    place = np.arange(body, tokens).reshape(questions, FACT_TOKENS)[:, 2:]
    answered[:, place.ravel()] = True
    return Quiz(ids, answered, told, tellings)


def _draw(
    body: int, facts: int, questions: int, random: np.random.Generator
) -> tuple[Ids, Ids, Ids]:
    keys = _keys(facts, random)
    values = random.integers(*VALUES, size=(facts, SAID))
    told = np.column_stack([np.full(facts, FACT), keys, values])
    starts = _places(body, facts, random)
    text = random.integers(*NOISE, size=body)
    text[starts[:, None] + np.arange(FACT_TOKENS)] = told
    last = {int(key): n for n, key in enumerate(keys)}  # a later telling replaces an earlier one
    asked = random.choice(list(last), size=questions, replace=questions > len(last))
    chosen = np.array([last[int(key)] for key in asked])
    tail = told[chosen].copy()
    tail[:, 0] = ASK
    count = np.array([int((keys == key).sum()) for key in asked])
    return np.concatenate([text, tail.ravel()]), starts[chosen], count


def _keys(facts: int, random: np.random.Generator) -> Ids:
    """A key for each telling, in mixed order: one to three tellings a key."""
    names = random.permutation(np.arange(*KEYS))
    repeats = random.integers(1, _TELLINGS + 1, size=len(names))
    return random.permutation(np.repeat(names, repeats)[:facts])


def _places(body: int, facts: int, random: np.random.Generator) -> Ids:
    """Where facts begin: apart from each other, in order."""
    gaps = np.sort(random.integers(0, body - facts * FACT_TOKENS + 1, size=facts))
    return np.asarray(gaps + np.arange(facts) * FACT_TOKENS, dtype=np.int64)


BLOCK: Final = 32  # tokens of a splice: the fact is within
_AT_ONCE: Final = 16  # texts that are read together


class Marks(NamedTuple):
    """Answers that were right in all their tokens, of ``n``."""

    plain: int  # with everything in its place
    n: int
    # with the block that holds the fact turned to where it would stand before the key's first
    # telling; of keys that were told more than once
    misplaced: int
    replaced: int  # with that block turned there and back: what turning alone costs
    repeated: int  # of the same questions as ``misplaced``, with everything in its place
    n_repeated: int  # how many those were


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
