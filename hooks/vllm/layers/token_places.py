"""In which token of a text each of its characters is, where no tokenizer says so."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]

_PART: Final = 64  # tokens that are decoded together; chosen
_BEFORE: Final = 8
"""Tokens before a part that are decoded with it: more than one character can have, and the first of
a text may lose a space. Chosen."""


class TokenPlaces:
    """Places of characters in decoded tokens, found part by part: each token is decoded a few times
    only, however long the text is.

    Args:
        decode: Tokens as text, special ones too.

    Attributes:
        length: Characters of all tokens; another number than the whole text has shows that this
            tokenizer's parts do not add up, and no place can be told.
    """

    def __init__(self, decode: Decode, tokens: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = tokens
        self._begins = [0]  # characters before each part
        for start in range(0, len(tokens), _PART):
            self._begins.append(self._begins[-1] + self._characters(start, start + _PART))
        self.length = self._begins[-1]

    def of(self, place: int) -> int:
        """The token in which the text's character at ``place`` is: from 0, below ``length``."""
        part = min(bisect_right(self._begins, place), len(self._begins) - 1) - 1
        start = part * _PART
        counts = range(1, min(_PART, len(self._tokens) - start) + 1)
        wanted = place + 1 - self._begins[part]
        return start + bisect_left(
            counts, wanted, key=lambda count: self._characters(start, start + count)
        )

    def _characters(self, start: int, end: int) -> int:
        """Characters of the tokens ``[start, end)``."""
        before = list(self._tokens[max(0, start - _BEFORE) : start])
        return len(self._decode([*before, *self._tokens[start:end]])) - len(self._decode(before))
