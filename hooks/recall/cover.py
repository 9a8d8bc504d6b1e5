"""Lays spans that are held along a prompt, from where its exact prefix ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from .spans import Domain, Piece, SpanIndex, Tokens


@dataclass(frozen=True, slots=True)
class SpliceLimits:
    """What a model's calibration allows.

    Attributes:
        least_tokens: A shorter piece is not worth its joint.
        most_distance: Tokens by which a piece may move towards the beginning (Δ < 0).
        most_joints: Pieces in a row.
        margin: Tokens at the end of what is covered that are computed all the same, so that what is
            computed next stands behind text that has read all before it.
        most_generations: Text that was computed exactly is of the first generation; what was
            computed behind spliced text is of the next one after the latest of that. Text of
            generations up to this one may be spliced.
        most_later: Tokens by which a piece may move towards the end (Δ > 0).
        openings: Whether a piece that stood at a prompt's very beginning may move: models read
            their first tokens in a way of their own.
    """

    least_tokens: int = 32
    most_distance: int = 1 << 20
    most_joints: int = 8
    margin: int = 8
    most_generations: int = 1
    most_later: int = 1 << 20
    openings: bool = True

    def __post_init__(self) -> None:
        if min(self.least_tokens, self.most_joints, self.most_generations) < 1:
            raise ValueError("a piece has a token at least, and a splice a piece of a generation")
        if min(self.most_distance, self.most_later, self.margin) < 0:
            raise ValueError("distances and margins are counted from 0 on")

    def allow(self, source: int, delta: int) -> bool:
        """Whether a piece that stood at position ``source`` may move by ``delta``."""
        near = -self.most_distance <= delta <= self.most_later
        return near and (self.openings or source > 0 or delta == 0)


def cover(
    index: SpanIndex,
    domains: Collection[Domain],
    tokens: Tokens,
    start: int,
    usable: Callable[[bytes], bool],
    limits: SpliceLimits,
    before: bytes = b"",
) -> list[Piece]:
    """Cover ``tokens`` from ``start`` on without a gap, the longest piece first at each joint.

    The engine computes a prompt from one position to its end. So what is covered must adjoin the
    exact prefix, and tokens inside of it cannot be computed: only the last ``margin`` are.

    Args:
        index: What the blocks that are held say.
        domains: Whose text may be used.
        tokens: The prompt, without the tokens that must be computed.
        start: Where the exact prefix ends.
        usable: Whether a block can be read now.
        limits: What is allowed.
        before: Hash of the last block that was found exactly, if one was. A cut seldom falls on a
            block's border: what of the block behind it is the same goes before all else, exact as
            it is and however short.
    """
    rest = index.continued(domains, before, tokens, start, usable)
    pieces: list[Piece] = []
    at = start + (rest.tokens if rest is not None else 0)
    while len(pieces) < limits.most_joints and len(tokens) - at >= limits.least_tokens:
        piece = index.longest(domains, tokens, at, usable, limits.allow)
        if piece is None or piece.tokens < limits.least_tokens:
            break
        pieces.append(piece)
        at += piece.tokens
    covered = _without_margin(pieces, limits)
    return [rest, *covered] if rest is not None and covered else covered


def _without_margin(pieces: list[Piece], limits: SpliceLimits) -> list[Piece]:
    """Give the last tokens back; a piece that is too short then goes as a whole."""
    if not pieces:
        return pieces
    last = pieces[-1].cut(pieces[-1].tokens - limits.margin)
    return [*pieces[:-1], last] if last.tokens >= limits.least_tokens else pieces[:-1]
