"""``SpanIndex``: which blocks say which tokens, at any alignment.

Tokens are kept in the engine's process only, for the blocks that were added last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

# ``Fingerprints``: hashes of short windows of tokens, at any alignment.

Tokens: TypeAlias = npt.NDArray[np.int64]

# Multipliers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_HALF: Final = np.uint64(32)


class Fingerprints:
    """Multilinear hashes of windows; whoever finds an equal one compares the tokens themselves.

    Args:
        window: Tokens that a fingerprint covers.
        rng: Draws the coefficients: nobody outside of this process can make windows collide.
    """

    def __init__(self, window: int, rng: np.random.Generator) -> None:
        self.window = window
        top = np.iinfo(np.uint64).max
        self._factors = rng.integers(1, top, window, dtype=np.uint64) | np.uint64(1)

    def of(self, tokens: Tokens) -> list[int]:
        """Fingerprints of all windows of ``tokens``: of those at 0, at 1, and so on."""
        if len(tokens) < self.window:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(_mixed(tokens), self.window)
        return self._sums(windows)

    def apart(self, tokens: Tokens) -> list[int]:
        """Fingerprints of adjoining windows: of those at 0, at ``window``, and so on."""
        return self._sums(_mixed(tokens).reshape(-1, self.window))

    def _sums(self, windows: npt.NDArray[np.uint64]) -> list[int]:
        sums: list[int] = (windows * self._factors).sum(1, dtype=np.uint64).tolist()
        return sums


def _mixed(tokens: Tokens) -> npt.NDArray[np.uint64]:
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _FIRST
    return (mixed ^ (mixed >> _HALF)) * _SECOND


# ``SaidText``: tokens that are kept, and compared with others.

_Ids: TypeAlias = npt.NDArray[np.int32]
_BYTES: Final = 4  # of a token


@dataclass(frozen=True, slots=True)
class SaidText:
    """Tokens as bytes: most comparisons are of equal ones, and end with one look at these.

    Attributes:
        raw: int32 ``[tokens]``.
    """

    raw: bytes

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> SaidText:
        """Keep ``tokens``."""
        return cls(np.asarray(tokens, dtype=np.int32).tobytes())

    def __len__(self) -> int:
        return len(self.raw) // _BYTES

    def common(self, first: int, other: SaidText, at: int) -> int:
        """How many tokens are the same, from ``first`` on here and from ``at`` on in ``other``."""
        mine = self.raw[_BYTES * first :]
        theirs = other.raw[_BYTES * at : _BYTES * at + len(mine)]
        if mine == theirs:
            return len(mine) // _BYTES
        count = min(len(mine), len(theirs)) // _BYTES
        differ = np.flatnonzero(_ids(mine)[:count] != _ids(theirs)[:count])
        return int(differ[0]) if len(differ) else count


def _ids(raw: bytes) -> _Ids:
    return np.frombuffer(raw, dtype=np.int32)


# ``SaidBlocks``: blocks whose text is known, and which of them follow which.

Domain: TypeAlias = tuple[str, ...]
"""Whose text it is: nobody finds another's."""

_MOST_CHILDREN: Final = 8  # of one block that are remembered in a domain; chosen


@dataclass(slots=True, eq=False)
class SaidBlock:
    """What one block says.

    Attributes:
        start: Position of its first token.
        before: Hash of the block before it; empty at the beginning.
        prints: Fingerprints of its windows.
    """

    block_hash: bytes
    domain: Domain
    start: int
    text: SaidText
    before: bytes
    prints: list[int]


class SaidBlocks:
    """Blocks by their hashes, the one that was used longest ago first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, SaidBlock] = OrderedDict()
        # By a block and whose text follows it, the blocks that do, oldest first.
        self._after: dict[tuple[bytes, Domain], list[SaidBlock]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def __iter__(self) -> Iterator[SaidBlock]:
        return iter(self._blocks.values())

    def get(self, block_hash: bytes) -> SaidBlock | None:
        """The block with this hash, if it is known."""
        return self._blocks.get(block_hash)

    def used(self, block_hash: bytes) -> None:
        """Note that a block that is known was used."""
        self._blocks.move_to_end(block_hash)

    def following(self, block_hash: bytes, domains: Collection[Domain]) -> list[SaidBlock]:
        """Blocks of ``domains`` that follow one, those that were entered last."""
        return [
            said for domain in domains for said in self._after.get((block_hash, domain), ())
        ]  # fmt: skip

    def enter(self, said: SaidBlock) -> None:
        """Add a block."""
        self._blocks[said.block_hash] = said
        if said.before:
            after = self._after.setdefault((said.before, said.domain), [])
            after.append(said)
            del after[:-_MOST_CHILDREN]

    def forget(self, said: SaidBlock) -> None:
        """Remove a block."""
        del self._blocks[said.block_hash]
        if siblings := self._after.get((said.before, said.domain)):
            siblings[:] = [each for each in siblings if each is not said]
            if not siblings:
                del self._after[said.before, said.domain]

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._after.clear()

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        for (before, domain), after in self._after.items():
            assert 0 < len(after) <= _MOST_CHILDREN
            assert all((said.before, said.domain) == (before, domain) for said in after)
            assert all(self._blocks.get(said.block_hash) is said for said in after)


NOBODYS: Final = -1
"""Stands for a token that is not to be found: no prompt has it."""

WINDOW: Final = 16  # tokens at most; chosen: a common block size, and more than a phrase
_MOST_PLACES: Final = 4  # of a domain's window: text may stand in many of its prompts; chosen
_MOST_FOLLOWED: Final = 4096  # blocks, after which no further place is tried; chosen: some 10 ms


class Segment(NamedTuple):
    """Adjoining tokens inside of one block.

    Attributes:
        block_hash: Hash of the block.
        first: The first of them, counted from the block's first token.
        tokens: How many they are.
    """

    block_hash: bytes
    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt that blocks of one sequence say, one after the other.

    Attributes:
        at: Position of the first of them in the prompt.
        delta: Δ: that position minus the one at which the blocks were computed.
        segments: Where they are, in order.
    """

    at: int
    delta: int
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """How many tokens it covers."""
        return sum(segment.tokens for segment in self.segments)

    def cut(self, tokens: int) -> Piece:
        """The piece's first ``tokens`` tokens."""
        kept: list[Segment] = []
        for segment in self.segments:
            if tokens > 0:
                kept.append(segment._replace(tokens=min(segment.tokens, tokens)))
            tokens -= segment.tokens
        return Piece(self.at, self.delta, tuple(kept))


class SpanIndex:
    """Finds spans of tokens among the blocks that were added last.

    Args:
        block_size: Tokens of a block.
        most_blocks: How many blocks are kept; then the one that was added or found longest ago
            goes.
        rng: See ``Fingerprints``.
        shortest: Tokens of the shortest piece that is sure to be found; the fewer, the more windows
            are kept.

    Attributes:
        version: Grows with every change.
    """

    def __init__(
        self,
        block_size: int,
        most_blocks: int,
        rng: np.random.Generator,
        shortest: int = 2 * WINDOW,
    ) -> None:
        self.version = 0
        self._size, self._most = block_size, most_blocks
        fits = (w for w in (WINDOW, 8, 4, 2) if block_size % w == 0 and 2 * w <= shortest + 1)
        window = next(fits, 1)
        self._prints = Fingerprints(window, rng)
        self._blocks = SaidBlocks()
        # By window, the blocks that say it and where, oldest first.
        self._places: dict[tuple[Domain, int], list[tuple[SaidBlock, int]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def domain(self, block_hash: bytes) -> Domain | None:
        """Whose text a block holds; None if that is not known (any more)."""
        said = self._blocks.get(block_hash)
        return None if said is None else said.domain

    def add(self, domain: Domain, hashes: Sequence[bytes], tokens: Tokens, first: int = 0) -> None:
        """Add full blocks of a sequence.

        Args:
            domain: Whose text those are that are not known yet.
            hashes: Of its blocks from the beginning on.
            tokens: Of all of them; ``NOBODYS`` where nothing is to be found.
            first: The first block to add, if it is not known.
        """
        size, before = self._size, b""
        for at, block_hash in enumerate(hashes):
            if block_hash in self._blocks:
                self._blocks.used(block_hash)
            elif at >= first:
                part = tokens[at * size : (at + 1) * size]
                said, prints = SaidText.of(part), self._prints.apart(part)
                self._enter(SaidBlock(block_hash, domain, at * size, said, before, prints))
            before = block_hash
        while len(self._blocks) > self._most:
            self._forget(next(iter(self._blocks)))

    def clear(self) -> None:
        """Forget everything."""
        self.version += 1
        self._blocks.clear()
        self._places.clear()

    def longest(
        self,
        domains: Collection[Domain],
        tokens: Tokens,
        at: int,
        usable: Callable[[bytes], bool],
        allow: Callable[[int, int], bool],
    ) -> Piece | None:
        """The longest piece that covers ``tokens`` from ``at`` on; None if there is none.

        What it finds is as long as a window at least. All that is as long as two is found, less one
        token, but where a window stands at more places than are remembered, or than there is time
        to follow.

        Args:
            domains: Whose text may be used.
            tokens: A prompt, up to where it may be covered.
            at: Where the piece begins.
            usable: Whether a block can be read now.
            allow: Whether a piece that stood at a position, the first argument, may move by Δ, the
                second.
        """
        best, covered, followed = None, self._prints.window - 1, 0
        prompt = SaidText.of(tokens)
        for said, first in self._places_of(domains, tokens, at):
            delta = at - said.start - first
            if not allow(at - delta, delta):
                continue
            segments = tuple(self._along(domains, said, first, prompt, at, usable))
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
        """What a block behind ``block_hash`` says of ``tokens`` from ``at`` on; None if nothing.

        It is less than a block, computed behind the same text and at the same place.

        Args:
            block_hash: Of the prompt's last block that was found exactly.
        """
        prompt = SaidText.of(tokens[at : at + self._size])
        there = [
            each for each in self._blocks.following(block_hash, domains) if usable(each.block_hash)
        ]
        said = max(there, key=lambda each: each.text.common(0, prompt, 0), default=None)
        same = said.text.common(0, prompt, 0) if said is not None else 0
        if said is None or not 0 < same < self._size:
            return None
        return Piece(at, 0, (Segment(said.block_hash, 0, same),))

    def _places_of(
        self, domains: Collection[Domain], tokens: Tokens, at: int
    ) -> Iterator[tuple[SaidBlock, int]]:
        """Blocks that say a window of what stands at ``at``, and where ``at`` is in them: before a
        block's first token, perhaps."""
        windows = self._prints.of(tokens[at : at + 2 * self._prints.window - 1])
        for ahead, fingerprint in enumerate(windows):
            for domain in domains:
                for said, offset in self._places.get((domain, fingerprint), ()):
                    yield said, offset - ahead

    def _along(
        self,
        domains: Collection[Domain],
        said: SaidBlock,
        first: int,
        prompt: SaidText,
        at: int,
        usable: Callable[[bytes], bool],
    ) -> Iterator[Segment]:
        """Follow a sequence's blocks, from the token ``first`` after ``said``'s first one on."""
        block: SaidBlock | None = said
        while first < 0:
            block = self._blocks.get(block.before) if block is not None else None
            first += self._size
        # Going back from ``said``, the block may be another domain's, whose prompt began alike.
        while block is not None and block.domain in domains and usable(block.block_hash):
            same = block.text.common(first, prompt, at)
            if same:
                self._blocks.used(block.block_hash)
                yield Segment(block.block_hash, first, same)
            if first + same < self._size:
                return
            at, first = at + same, 0
            after = self._blocks.following(block.block_hash, domains)
            if len(after) > 1:
                wanted = at  # bound now
                after.sort(key=lambda said: -said.text.common(0, prompt, wanted))
            block = after[0] if after else None

    def _enter(self, said: SaidBlock) -> None:
        self.version += 1
        self._blocks.enter(said)
        for number, fingerprint in enumerate(said.prints):
            places = self._places.setdefault((said.domain, fingerprint), [])
            places.append((said, number * self._prints.window))
            del places[:-_MOST_PLACES]

    def _forget(self, said: SaidBlock) -> None:
        self.version += 1
        self._blocks.forget(said)
        for window in ((said.domain, fingerprint) for fingerprint in said.prints):
            places = [each for each in self._places.get(window, ()) if each[0] is not said]
            if places:
                self._places[window] = places
            else:
                self._places.pop(window, None)

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        self._blocks.check_integrity()
        assert len(self._blocks) <= self._most
        for (domain, fingerprint), places in self._places.items():
            assert 0 < len(places) <= _MOST_PLACES
            assert all(said.domain == domain for said, _ in places)
            assert all(fingerprint in said.prints for said, _ in places)
            assert all(self._blocks.get(said.block_hash) is said for said, _ in places)
