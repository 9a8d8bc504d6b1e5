"""Chooses known spans to cover a prompt, from the end of its exact prefix."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from .spans import Domain, Piece, SpanIndex, Tokens


@dataclass(frozen=True, slots=True)
class SpliceLimits:
    """The moves that a model's calibration allows."""

    least_tokens: int = 32  # shortest piece worth splicing
    most_distance: int = 1 << 20  # most tokens that a piece may move towards the beginning (Δ < 0)
    most_joints: int = 8  # most consecutive pieces
    # Tokens at the end of the covered part that are computed anyway, so that the text computed next
    # follows text that attended to everything before it.
    margin: int = 8
    # Highest generation that may be spliced. Exactly computed text is generation 1; text computed
    # after spliced text is one generation above the highest of that text.
    most_generations: int = 1
    most_later: int = 1 << 20  # most tokens that a piece may move towards the end (Δ > 0)
    # Whether a piece from the very beginning of a prompt may move; models attend to their first
    # tokens in a special way.
    openings: bool = True

    def __post_init__(self) -> None:
        if min(self.least_tokens, self.most_joints, self.most_generations) < 1:
            raise ValueError("a piece has a token at least, and a splice a piece of a generation")
        if min(self.most_distance, self.most_later, self.margin) < 0:
            raise ValueError("distances and margins are counted from 0 on")

    def allow(self, source: int, delta: int) -> bool:
        """Return whether a piece from position ``source`` may move by ``delta``."""
        near = -self.most_distance <= delta <= self.most_later
        return near and (self.openings or source > 0 or delta == 0)


def cover(
    index: SpanIndex,
    domains: Collection[Domain],  # domains whose text may be used
    tokens: Tokens,  # the prompt, without the tokens that must be computed
    start: int,  # where the exact prefix ends
    usable: Callable[[bytes], bool],  # whether a block can be read now
    limits: SpliceLimits,
    # hash of the last block of the exact prefix; empty without one. A continuation of that block is
    # taken first, however short, because it is exact
    before: bytes = b"",
) -> list[Piece]:
    """Cover ``tokens`` from ``start`` on without a gap, using the longest piece at each joint.

    The engine computes a prompt from one position to its end, so pieces must adjoin the exact
    prefix, and no token between them can be computed: only the last ``margin`` tokens are.
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
    """Give back the last ``margin`` tokens, and the whole last piece if the rest is too short."""
    if not pieces:
        return pieces
    last = pieces[-1].cut(pieces[-1].tokens - limits.margin)
    return [*pieces[:-1], last] if last.tokens >= limits.least_tokens else pieces[:-1]
