"""``SaidBlocks``: blocks whose text is known, and which of them follow which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from .said_text import SaidText

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
