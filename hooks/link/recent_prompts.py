"""``RecentPrompts``: how far into a block a prompt goes along with another one.

A graph knows by keys at which block two prompts part. Only an engine has the tokens, and only while
it has both prompts; nothing of them leaves it but a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

_MOST: Final = 64  # prompts; chosen
_MOST_TOKENS: Final = 262_144  # of them all, which the engine has as a list: 9 MB at most; chosen


class _Prompt(NamedTuple):
    tokens: Sequence[int]
    hashes: Sequence[bytes]


class RecentPrompts:
    """The last prompts of an engine; for the thread that sends.

    Args:
        block_size: Tokens.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._prompts: deque[_Prompt] = deque()
        self._tokens = 0

    def add(self, tokens: Sequence[int], hashes: Sequence[bytes], missing: int) -> int:
        """Remember a prompt; returns how many tokens of its block ``missing`` stand at the same
        place in one of those before, after the same beginning.

        Args:
            hashes: Of its full blocks; each covers all before it, a cache salt among it.
            missing: The first block that was not found.

        Returns:
            Less than a block; 0 where no other prompt parts from it there.
        """
        same = self._same(tokens, hashes, missing) if 0 < missing < len(hashes) else 0
        self._prompts.append(_Prompt(tokens, hashes))
        self._tokens += len(tokens)
        while len(self._prompts) > _MOST or self._tokens > _MOST_TOKENS:
            self._tokens -= len(self._prompts.popleft().tokens)
        return same

    def _same(self, tokens: Sequence[int], hashes: Sequence[bytes], missing: int) -> int:
        start = missing * self._size
        block = tokens[start : start + self._size]
        return max((self._along(each, hashes, missing, block) for each in self._prompts), default=0)

    def _along(
        self, other: _Prompt, hashes: Sequence[bytes], missing: int, block: Sequence[int]
    ) -> int:
        """Tokens of a block that another prompt has too, if it parts from this one there."""
        parts = len(other.hashes) > missing and other.hashes[missing] != hashes[missing]
        if not parts or other.hashes[missing - 1] != hashes[missing - 1]:
            return 0
        start = missing * self._size
        for place, token in enumerate(block):
            if other.tokens[start + place] != token:
                return place
        return 0  # the same text under another adapter or image


class LatePrompt:
    """A prompt whose place among the recent ones is found when its start is sent.

    Args:
        missing: The first block that was not found.
    """

    __slots__ = ("_missing", "_recent", "_tokens")

    def __init__(self, recent: RecentPrompts, tokens: Sequence[int], missing: int) -> None:
        self._recent, self._tokens, self._missing = recent, tokens, missing

    def same_tokens(self, hashes: Sequence[bytes]) -> int:
        """See ``RecentPrompts.add``."""
        return self._recent.add(self._tokens, hashes, self._missing)
