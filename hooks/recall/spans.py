"""``SpanIndex``: finds spans of tokens in known blocks, at any alignment. Tokens are kept in the
engine's process only, for the most recently added blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int64]

# Multipliers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_HALF: Final = np.uint64(32)


class Fingerprints:
    """Computes multilinear hashes of windows of ``window`` tokens; callers compare the tokens of
    windows with equal hashes. ``rng`` draws the coefficients, so that nobody outside this process
    can make windows collide.
    """

    def __init__(self, window: int, rng: np.random.Generator) -> None:
        self.window = window
        top = np.iinfo(np.uint64).max
        self._factors = rng.integers(1, top, window, dtype=np.uint64) | np.uint64(1)

    def of(self, tokens: Tokens) -> list[int]:
        """Return fingerprints of all windows of ``tokens``: those from 0, from 1, and so on."""
        if len(tokens) < self.window:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(_mixed(tokens), self.window)
        return self._sums(windows)

    def apart(self, tokens: Tokens) -> list[int]:
        """Return those of adjacent windows: from 0, from ``window``, and so on."""
        return self._sums(_mixed(tokens).reshape(-1, self.window))

    def _sums(self, windows: npt.NDArray[np.uint64]) -> list[int]:
        sums: list[int] = (windows * self._factors).sum(1, dtype=np.uint64).tolist()
        return sums


def _mixed(tokens: Tokens) -> npt.NDArray[np.uint64]:
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _FIRST
    return (mixed ^ (mixed >> _HALF)) * _SECOND


_Ids: TypeAlias = npt.NDArray[np.int32]
_BYTES: Final = 4  # of a token


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Tokens as int32 bytes: most compared runs are equal, which one ``==`` establishes."""

    raw: bytes  # int32 ``[tokens]``

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> TokenBytes:
        """Pack token ids, integers ``[tokens]`` that fit into int32."""
        return cls(np.asarray(tokens, dtype=np.int32).tobytes())

    def __len__(self) -> int:
        return len(self.raw) // _BYTES

    def common(self, first: int, other: TokenBytes, at: int) -> int:
        """Return how long the runs from ``first`` here and ``at`` in ``other`` agree."""
        mine = self.raw[_BYTES * first :]
        theirs = other.raw[_BYTES * at : _BYTES * at + len(mine)]
        if mine == theirs:
            return len(mine) // _BYTES
        count = min(len(mine), len(theirs)) // _BYTES
        differ = np.flatnonzero(_ids(mine)[:count] != _ids(theirs)[:count])
        return int(differ[0]) if len(differ) else count


def _ids(raw: bytes) -> _Ids:
    return np.frombuffer(raw, dtype=np.int32)


Domain: TypeAlias = tuple[str, ...]
"""Owner of a text: tenant, cache salt, session. A lookup finds text of given domains only."""

_MOST_CHILDREN: Final = 8  # following blocks remembered per block and domain; chosen


@dataclass(slots=True, eq=False)
class TextBlock:
    block_hash: bytes
    domain: Domain
    start: int  # position of its first token in the sequence
    text: TokenBytes
    before: bytes  # hash of the block before it; empty for a sequence's first block
    prints: list[int]  # fingerprints of its adjoining windows


class TextBlocks:
    """Blocks by hash, least recently used first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, TextBlock] = OrderedDict()
        # By block hash and domain: the blocks that follow, oldest first.
        self._after: dict[tuple[bytes, Domain], list[TextBlock]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def __iter__(self) -> Iterator[TextBlock]:
        return iter(self._blocks.values())

    def get(self, block_hash: bytes) -> TextBlock | None:
        return self._blocks.get(block_hash)

    def used(self, block_hash: bytes) -> None:
        self._blocks.move_to_end(block_hash)

    def following(self, block_hash: bytes, domains: Collection[Domain]) -> list[TextBlock]:
        """Return the most recently added blocks of ``domains`` that follow ``block_hash``."""
        after = (self._after.get((block_hash, domain), ()) for domain in domains)
        return [entry for entries in after for entry in entries]

    def enter(self, entry: TextBlock) -> None:
        self._blocks[entry.block_hash] = entry
        if entry.before:
            after = self._after.setdefault((entry.before, entry.domain), [])
            after.append(entry)
            del after[:-_MOST_CHILDREN]

    def forget(self, entry: TextBlock) -> None:
        del self._blocks[entry.block_hash]
        if siblings := self._after.get((entry.before, entry.domain)):
            siblings[:] = [each for each in siblings if each is not entry]
            if not siblings:
                del self._after[entry.before, entry.domain]

    def clear(self) -> None:
        self._blocks.clear()
        self._after.clear()

    def check_integrity(self) -> None:
        for (before, domain), after in self._after.items():
            assert 0 < len(after) <= _MOST_CHILDREN
            assert all((entry.before, entry.domain) == (before, domain) for entry in after)
            assert all(self._blocks.get(entry.block_hash) is entry for entry in after)


UNFINDABLE: Final = -1  # token id that no prompt contains; marks tokens that must not be found

WINDOW: Final = 16  # tokens at most; chosen: a common block size, and more than a phrase
_MOST_PLACES: Final = 4  # places remembered per window and domain; chosen
_MOST_FOLLOWED: Final = 4096  # blocks to follow before giving up; chosen: some 10 ms


class BlockSpan(NamedTuple):
    """A run of tokens inside one block."""

    block_hash: bytes  # hash of the block
    first: int  # offset of the run's first token in the block
    tokens: int  # length of the run


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of prompt tokens that consecutive blocks of one sequence hold."""

    at: int  # position of the run in the prompt
    delta: int  # that position minus the position at which the blocks were computed
    segments: tuple[BlockSpan, ...]  # which blocks hold the tokens, in order

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    def cut(self, tokens: int) -> Piece:
        kept: list[BlockSpan] = []
        for segment in self.segments:
            if tokens > 0:
                kept.append(segment._replace(tokens=min(segment.tokens, tokens)))
            tokens -= segment.tokens
        return Piece(self.at, self.delta, tuple(kept))


class SpanIndex:
    """Finds spans of tokens among the most recently added blocks."""

    def __init__(
        self,
        block_size: int,  # tokens per block
        most_blocks: int,  # capacity in blocks; beyond it the least recently used block is dropped
        rng: np.random.Generator,  # see `Fingerprints`
        # length in tokens of the shortest piece that is sure to be found; a smaller one takes more
        # memory
        shortest: int = 2 * WINDOW,
    ) -> None:
        self.version = 0  # grows with every change
        self._size, self._most = block_size, most_blocks
        fits = (w for w in (WINDOW, 8, 4, 2) if block_size % w == 0 and 2 * w <= shortest + 1)
        window = next(fits, 1)
        self._prints = Fingerprints(window, rng)
        self._blocks = TextBlocks()
        # By domain and window: the blocks that hold it, and where; oldest first.
        self._places: dict[tuple[Domain, int], list[tuple[TextBlock, int]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def domain(self, block_hash: bytes) -> Domain | None:
        """Return the domain of a block's text; None if the block is not known."""
        entry = self._blocks.get(block_hash)
        return None if entry is None else entry.domain

    def add(self, domain: Domain, hashes: Sequence[bytes], tokens: Tokens, first: int = 0) -> None:
        """Add a sequence's full blocks from index ``first`` on, as far as they are new in
        ``domain``. Tokens that must not be found are ``UNFINDABLE`` in ``tokens``.
        """
        size, before = self._size, b""
        for at, block_hash in enumerate(hashes):
            if block_hash in self._blocks:
                self._blocks.used(block_hash)
            elif at >= first:
                part = tokens[at * size : (at + 1) * size]
                entry, prints = TokenBytes.of(part), self._prints.apart(part)
                self._enter(TextBlock(block_hash, domain, at * size, entry, before, prints))
            before = block_hash
        while len(self._blocks) > self._most:
            self._forget(next(iter(self._blocks)))

    def clear(self) -> None:
        self.version += 1
        self._blocks.clear()
        self._places.clear()

    def longest(
        self,
        domains: Collection[Domain],  # domains whose text may be used
        tokens: Tokens,  # the prompt, up to where it may be covered
        at: int,  # where the piece begins
        usable: Callable[[bytes], bool],  # whether a block can be read now
        allow: Callable[[int, int], bool],  # whether a piece may move; gets its old position, and Δ
    ) -> Piece | None:
        """Return the longest piece that matches ``tokens`` from ``at`` on; None if there is none.

        A piece is at least one window long. Every match of at least two windows minus one token is
        found, unless a window occurs in more places than are remembered or can be tried in time.
        """
        best, covered, followed = None, self._prints.window - 1, 0
        prompt = TokenBytes.of(tokens)
        for entry, first in self._places_of(domains, tokens, at):
            delta = at - entry.start - first
            if not allow(at - delta, delta):
                continue
            segments = tuple(self._along(domains, entry, first, prompt, at, usable))
            reached = sum(segment.tokens for segment in segments)
            if reached > covered:
                best, covered = Piece(at, delta, segments), reached
            followed += len(segments)
            if reached == len(tokens) - at or followed > _MOST_FOLLOWED:
                break
        return best

    def continued(
        self,
        domains: Collection[Domain],
        block_hash: bytes,
        tokens: Tokens,
        at: int,
        usable: Callable[[bytes], bool],
    ) -> Piece | None:
        """Return a piece that continues the exact prefix ending in ``block_hash``; None if there is
        none. It is shorter than a block, and was computed after the same text at the same position.
        """
        prompt = TokenBytes.of(tokens[at : at + self._size])
        there = [
            each for each in self._blocks.following(block_hash, domains) if usable(each.block_hash)
        ]
        entry = max(there, key=lambda each: each.text.common(0, prompt, 0), default=None)
        same = entry.text.common(0, prompt, 0) if entry is not None else 0
        if entry is None or not 0 < same < self._size:
            return None
        return Piece(at, 0, (BlockSpan(entry.block_hash, 0, same),))

    def _places_of(
        self, domains: Collection[Domain], tokens: Tokens, at: int
    ) -> Iterator[tuple[TextBlock, int]]:
        """Yield blocks with a window found near ``at``, and the offset of ``at`` in each."""
        windows = self._prints.of(tokens[at : at + 2 * self._prints.window - 1])
        for ahead, fingerprint in enumerate(windows):
            for domain in domains:
                for entry, offset in self._places.get((domain, fingerprint), ()):
                    yield entry, offset - ahead

    def _along(
        self,
        domains: Collection[Domain],
        entry: TextBlock,
        first: int,
        prompt: TokenBytes,
        at: int,
        usable: Callable[[bytes], bool],
    ) -> Iterator[BlockSpan]:
        """Follow blocks while they match the prompt, from offset ``first`` in ``entry`` on."""
        block: TextBlock | None = entry
        while first < 0:
            block = self._blocks.get(block.before) if block is not None else None
            first += self._size
        # An earlier block may belong to another domain whose prompt began alike.
        while block is not None and block.domain in domains and usable(block.block_hash):
            same = block.text.common(first, prompt, at)
            if same:
                self._blocks.used(block.block_hash)
                yield BlockSpan(block.block_hash, first, same)
            if first + same < self._size:
                return
            at, first = at + same, 0
            after = self._blocks.following(block.block_hash, domains)
            if len(after) > 1:
                wanted = at  # bound now
                after.sort(key=lambda entry: -entry.text.common(0, prompt, wanted))
            block = after[0] if after else None

    def _enter(self, entry: TextBlock) -> None:
        self.version += 1
        self._blocks.enter(entry)
        for number, fingerprint in enumerate(entry.prints):
            places = self._places.setdefault((entry.domain, fingerprint), [])
            places.append((entry, number * self._prints.window))
            del places[:-_MOST_PLACES]

    def _forget(self, entry: TextBlock) -> None:
        self.version += 1
        self._blocks.forget(entry)
        for window in ((entry.domain, fingerprint) for fingerprint in entry.prints):
            places = [each for each in self._places.get(window, ()) if each[0] is not entry]
            if places:
                self._places[window] = places
            else:
                self._places.pop(window, None)

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        assert len(self._blocks) <= self._most
        for (domain, fingerprint), places in self._places.items():
            assert 0 < len(places) <= _MOST_PLACES
            assert all(entry.domain == domain for entry, _ in places)
            assert all(fingerprint in entry.prints for entry, _ in places)
            assert all(self._blocks.get(entry.block_hash) is entry for entry, _ in places)
