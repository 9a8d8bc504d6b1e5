"""Chats in the language of the small model that remembers: facts, noise, and questions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from ..teaching.recall_language import ASK, FACT, KEYS, NOISE, SAID, VALUES

WORD: Final = (
    "t"  # what the words of the model that remembers begin with: its tokens' numbers follow
)
_NOISE: Final = 18  # words around a fact; chosen: all of a chat fits into what the model was taught
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """A chat before its questions: the user's messages, one a turn; each tells a fact, of a key and
    its value.
    """

    messages: list[str]
    keys: list[int]
    values: list[list[int]]

    def question(self, at: int) -> str:
        """Asks for what the message ``at`` told."""
        return said([ASK, self.keys[at]])

    def answer(self, at: int) -> list[str]:
        return said(self.values[at]).split()


def tell(turns: int, rng: random.Random, noise: int = _NOISE) -> Told:
    """A chat of ``turns`` messages with ``noise`` words around each fact, of as many keys while
    there are some; later ones replace.
    """
    keys = rng.sample(range(*KEYS), min(turns, KEYS[1] - KEYS[0]))
    keys += rng.choices(keys[len(keys) // 2 :], k=turns - len(keys))
    values = [[rng.randrange(*VALUES) for _ in range(SAID)] for _ in keys]
    texts = [_message(*each, noise, rng) for each in zip(keys, values, strict=True)]
    return Told(texts, keys, values)


def said(tokens: list[int]) -> str:
    return " ".join(f"{WORD}{token}" for token in tokens)


def noise_of(words: int, rng: random.Random) -> list[int]:
    return [rng.randrange(*NOISE) for _ in range(words)]


def _message(key: int, values: list[int], noise: int, rng: random.Random) -> str:
    words = noise_of(noise, rng)
    half = noise // 2
    return said([*words[:half], FACT, key, *values, *words[half:]])
