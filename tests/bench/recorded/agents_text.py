"""The text of recorded sessions: which token stands where, by one stated rule.

A recorded block of 64 tokens becomes one token: a position p of the recording is position p // 64
of the text. A recorded block is known by a number that stands for everything before it too; so

- equal numbers get equal tokens, and different blocks after the same prefix different ones: two
  texts share exactly as many tokens as the recordings share blocks;
- a token's quarter of the vocabulary's middle says what it is of: the head (tools and system
  prompt), what a user wrote, what a tool returned, what the model answered; the eighths at both
  ends stay clear, for special tokens;
- within its quarter a token is drawn by a digest of seed and number; if a sibling (another block
  after the same prefix) has it, the next free one is taken.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Final

from ..errors import TrafficError


class Kind(IntEnum):
    """What a token is of."""

    HEAD = 0
    USER = 1
    TOOL = 2
    ANSWER = 3


ROOT: Final = -1
"""The number of the empty prefix."""


class TokenWriter:
    """Gives recorded blocks their tokens; the same calls in the same order give the same ones.

    Args:
        vocabulary: How many token ids the model knows.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._first, self._quarter = _bands(vocabulary)
        self._seed = seed
        self._tokens: dict[int, int] = {}
        self._taken: dict[int, set[int]] = {}  # prefix → tokens that stand behind it

    def token(self, number: int, before: int, kind: Kind) -> int:
        """The token of block ``number``, which follows the prefix that ends with ``before``.

        Args:
            kind: What it is of; the first call for a number decides.

        Raises:
            TrafficError: So many blocks follow this prefix that their quarter is used up.
        """
        found = self._tokens.get(number)
        if found is None:
            found = self._tokens[number] = self._new(number, before, kind)
        return found

    def _new(self, number: int, before: int, kind: Kind) -> int:
        taken = self._taken.setdefault(before, set())
        raw = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(raw, "little")
        start = self._first + kind * self._quarter
        for step in range(self._quarter):
            token = start + (drawn + step) % self._quarter
            if token not in taken:
                taken.add(token)
                return token
        raise TrafficError(
            f"more than {self._quarter} texts part at one place: a model with a larger vocabulary, "
            "fewer users or fewer requests would do"
        )


def kind_of(token: int, vocabulary: int) -> Kind:
    """What a token of a text is of."""
    first, quarter = _bands(vocabulary)
    return Kind((token - first) // quarter)


def endings(vocabulary: int) -> tuple[int, int]:
    """The tokens with which an answer ends that calls a tool, and one that ends its turn."""
    return vocabulary - 2, vocabulary - 1


def _bands(vocabulary: int) -> tuple[int, int]:
    """The first token that texts use, and how many each kind has."""
    first = vocabulary // 8
    return first, (vocabulary * 7 // 8 - first) // len(Kind)
