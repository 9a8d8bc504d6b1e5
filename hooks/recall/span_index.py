"""``SpanIndex``: which blocks say which tokens, at any alignment.

Tokens are kept in the engine's process only, for the blocks that were added last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from .fingerprints import Fingerprints, Tokens, common_start

Domain: TypeAlias = tuple[str, ...]
"""Whose text it is: nobody finds another's."""

NOBODYS: Final = -1
"""Stands for a token that is not to be found: no prompt has it."""

WINDOW: Final = 16  # tokens; chosen: a common block size, and more than a phrase
_MOST_PLACES: Final = 4  # of a domain's window: text may stand in many of its prompts; chosen
_MOST_CHILDREN: Final = 8  # of one block that are remembered in a domain; chosen


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


@dataclass(slots=True, eq=False)
class _Said:
    """What one block says.

    Attributes:
        start: Position of its first token.
        before: Hash of the block before it; empty at the beginning.
    """

    block_hash: bytes
    domain: Domain
    start: int
    tokens: Tokens
    before: bytes
    prints: list[int]


class SpanIndex:
    """Finds spans of tokens among the blocks that were added last.

    Args:
        block_size: Tokens of a block.
        most_blocks: How many blocks are kept; then the one that was added or found longest ago
            goes.
        rng: See ``Fingerprints``.

    Attributes:
        version: Grows with every change.
    """

    def __init__(self, block_size: int, most_blocks: int, rng: np.random.Generator) -> None:
        self.version = 0
        self._size, self._most = block_size, most_blocks
        window = next(w for w in (WINDOW, 8, 4, 2, 1) if block_size % w == 0)
        self._prints = Fingerprints(window, rng)
        self._blocks: OrderedDict[bytes, _Said] = OrderedDict()
        # By window, the blocks that say it and where, oldest first.
        self._places: dict[tuple[Domain, int], list[tuple[_Said, int]]] = {}
        # By a block and whose text follows it, the blocks that do, oldest first.
        self._after: dict[tuple[bytes, Domain], list[_Said]] = {}

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
                self._blocks.move_to_end(block_hash)
            elif at >= first:
                part = tokens[at * size : (at + 1) * size].copy()
                prints = self._prints.apart(part)
                self._enter(_Said(block_hash, domain, at * size, part, before, prints))
            before = block_hash
        while len(self._blocks) > self._most:
            self._forget(next(iter(self._blocks.values())))

    def clear(self) -> None:
        """Forget everything."""
        self.version += 1
        for table in (self._blocks, self._places, self._after):
            table.clear()

    def longest(
        self,
        domains: Collection[Domain],
        tokens: Tokens,
        at: int,
        usable: Callable[[bytes], bool],
        allow: Callable[[int, int], bool],
    ) -> Piece | None:
        """The longest piece that covers ``tokens`` from ``at`` on; None if there is none.

        What it finds is as long as a window at least. All that is as long as two is found, but
        where a window stands at more places than are remembered.

        Args:
            domains: Whose text may be used.
            tokens: A prompt, up to where it may be covered.
            at: Where the piece begins.
            usable: Whether a block can be read now.
            allow: Whether a piece that stood at a position, the first argument, may move by Δ, the
                second.
        """
        best: Piece | None = None
        window = self._prints.window
        for ahead, fingerprint in enumerate(self._prints.of(tokens[at : at + 2 * window - 1])):
            for said, offset in self._saying(domains, fingerprint):
                delta = at + ahead - said.start - offset
                if not allow(at - delta, delta):
                    continue
                along = self._along(domains, said, offset - ahead, tokens, at, usable)
                segments = tuple(along)
                piece = Piece(at, delta, segments)
                if best is None or piece.tokens > best.tokens:
                    best = piece
        return best if best is not None and best.tokens >= window else None

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
        there = [each for each in self._following(block_hash, domains) if usable(each.block_hash)]
        said = max(there, key=lambda each: common_start(each.tokens, tokens[at:]), default=None)
        same = common_start(said.tokens, tokens[at:]) if said is not None else 0
        if said is None or not 0 < same < self._size:
            return None
        return Piece(at, 0, (Segment(said.block_hash, 0, same),))

    def _saying(self, domains: Collection[Domain], fingerprint: int) -> Iterator[tuple[_Said, int]]:
        for domain in domains:
            yield from self._places.get((domain, fingerprint), ())

    def _along(
        self,
        domains: Collection[Domain],
        said: _Said,
        first: int,
        tokens: Tokens,
        at: int,
        usable: Callable[[bytes], bool],
    ) -> Iterator[Segment]:
        """Follow a sequence's blocks, from the token ``first`` after ``said``'s first one on."""
        block: _Said | None = said
        while first < 0:
            block = self._blocks.get(block.before) if block is not None else None
            first += self._size
        # Going back from ``said``, the block may be another domain's, whose prompt began alike.
        while block is not None and block.domain in domains and usable(block.block_hash):
            same = common_start(block.tokens[first:], tokens[at:])
            if same:
                self._blocks.move_to_end(block.block_hash)
                yield Segment(block.block_hash, first, same)
            if first + same < self._size:
                return
            at, first = at + same, 0
            block = self._next(block, domains, tokens[at : at + self._size])

    def _next(self, block: _Said, domains: Collection[Domain], wanted: Tokens) -> _Said | None:
        after = list(self._following(block.block_hash, domains))
        if len(after) < 2:
            return after[0] if after else None
        return max(after, key=lambda said: common_start(said.tokens, wanted))

    def _following(self, block_hash: bytes, domains: Collection[Domain]) -> Iterator[_Said]:
        for domain in domains:
            yield from self._after.get((block_hash, domain), ())

    def _enter(self, said: _Said) -> None:
        self.version += 1
        self._blocks[said.block_hash] = said
        if said.before:
            after = self._after.setdefault((said.before, said.domain), [])
            after.append(said)
            del after[:-_MOST_CHILDREN]
        for number, fingerprint in enumerate(said.prints):
            places = self._places.setdefault((said.domain, fingerprint), [])
            places.append((said, number * self._prints.window))
            del places[:-_MOST_PLACES]

    def _forget(self, said: _Said) -> None:
        self.version += 1
        del self._blocks[said.block_hash]
        if siblings := self._after.get((said.before, said.domain)):
            siblings[:] = [each for each in siblings if each is not said]
            if not siblings:
                del self._after[said.before, said.domain]
        for window in ((said.domain, fingerprint) for fingerprint in said.prints):
            places = [each for each in self._places.get(window, ()) if each[0] is not said]
            if places:
                self._places[window] = places
            else:
                self._places.pop(window, None)

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._blocks) <= self._most
        for (domain, fingerprint), places in self._places.items():
            assert 0 < len(places) <= _MOST_PLACES
            assert all(said.domain == domain for said, _ in places)
            assert all(fingerprint in said.prints for said, _ in places)
            assert all(self._blocks.get(said.block_hash) is said for said, _ in places)
        for (before, domain), after in self._after.items():
            assert 0 < len(after) <= _MOST_CHILDREN
            assert all((said.before, said.domain) == (before, domain) for said in after)
            assert all(self._blocks.get(said.block_hash) is said for said in after)
