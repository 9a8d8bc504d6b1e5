"""Turns pieces of a prompt into runs between copies and a request's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...recall.span_index import Piece
from ...tiers.directory import Copy, CopyDirectory
from ...tiers.jobs import Run
from ..transfers.loader import Splice


def splice_of(
    pieces: Sequence[Piece], ids: Sequence[int], block_size: int, directory: CopyDirectory
) -> Splice:
    """What brings ``pieces`` into a request's blocks; their copies are pinned until it is done.

    Args:
        pieces: Adjoining, from a prompt's first approximate token on.
        ids: The request's blocks, from its first on.
        block_size: Tokens of a block.
        directory: Finds the copies; all of them are in memory.
    """
    copies: dict[bytes, Copy] = {}

    def number(block_hash: bytes) -> int:
        copy = copies.get(block_hash) or directory.warm(block_hash)
        assert copy is not None, "a copy that was counted on is gone"
        copies[block_hash] = copy
        return copy.id

    runs = tuple(run for piece in pieces for run in _runs(piece, ids, block_size, number))
    for copy in copies.values():
        copy.pins += 1
        directory.leaves(copy.block_hash)  # wanted now
    last = pieces[-1].at + pieces[-1].tokens
    written = ids[pieces[0].at // block_size : -(-last // block_size)]
    return Splice(runs, tuple(written), tuple(copies.values()))


def _runs(
    piece: Piece, ids: Sequence[int], block_size: int, number: Callable[[bytes], int]
) -> Iterator[Run]:
    """Cut a piece's segments where the request's blocks end."""
    at = piece.at
    for block_hash, first, tokens in piece.segments:
        end = first + tokens
        while first < end:
            within = at % block_size
            count = min(end - first, block_size - within)
            slot = ids[at // block_size] * block_size + within
            yield Run(number(block_hash), first, slot, count, piece.delta)
            at, first = at + count, first + count
