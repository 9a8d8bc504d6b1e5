"""A language in which remembering can be measured, and in which order matters.

A text is noise with facts in it: ``FACT key v v v``. It ends with questions: ``ASK key v v v``. The
same key is told up to three times with other values, and what was told last is right: whoever mixes
up what stood where answers with an older value. All of it is drawn from 256 tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SIZE: Final = 256
FACT, ASK = 1, 2
KEYS: Final = (16, 80)
VALUES: Final = (80, 208)
NOISE: Final = (208, 256)
SAID: Final = 3  # value tokens of a fact
FACT_TOKENS: Final = 2 + SAID
_TELLINGS: Final = 3  # of one key, at most

Ids = NDArray[np.int64]


def make_quiz(
    texts: int, tokens: int, facts: int, questions: int, random: np.random.Generator
) -> Ids:
    """Token ids [texts, tokens]; the last ``questions * FACT_TOKENS`` are questions, answered."""
    body = tokens - questions * FACT_TOKENS
    if facts * FACT_TOKENS > body:
        raise ValueError(f"{facts} facts do not fit into {body} tokens")
    return np.stack([_draw(body, facts, questions, random) for _ in range(texts)])


def _draw(body: int, facts: int, questions: int, random: np.random.Generator) -> Ids:
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
    return np.concatenate([text, tail.ravel()])


def _keys(facts: int, random: np.random.Generator) -> Ids:
    """A key for each telling, in mixed order: one to three tellings a key."""
    names = random.permutation(np.arange(*KEYS))
    repeats = random.integers(1, _TELLINGS + 1, size=len(names))
    return random.permutation(np.repeat(names, repeats)[:facts])


def _places(body: int, facts: int, random: np.random.Generator) -> Ids:
    """Where facts begin: apart from each other, in order."""
    gaps = np.sort(random.integers(0, body - facts * FACT_TOKENS + 1, size=facts))
    return np.asarray(gaps + np.arange(facts) * FACT_TOKENS, dtype=np.int64)
