"""``SplicePlans``: what can be spliced into requests that wait for room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ...recall.cover import SpliceLimits, cover
from ...recall.fingerprints import Tokens
from ...recall.said_blocks import Domain
from ...recall.span_index import Piece, SpanIndex
from ...tiers.ledger import TierLedger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..observe.group import ObservedGroup

_AGAIN_S: Final = 0.1  # after which a waiting request is matched anew, if anything changed; chosen


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """What a load brings for a request that was looked up.

    Attributes:
        first: Blocks that the pool holds.
        loaded: Blocks behind them with exact copies.
        pieces: What is spliced behind those.
        at: When it was made, monotonic seconds.
        lost, version: How many copies were given up until then, and what was known of text.
    """

    first: int
    loaded: int
    pieces: tuple[Piece, ...]
    at: float
    lost: int
    version: int

    @property
    def spliced(self) -> int:
        """Tokens that are spliced."""
        return sum(piece.tokens for piece in self.pieces)


class SplicePlans:
    """Plans a splice at a request's lookup, and keeps it until the request is given its blocks.

    Args:
        group: The observed KV cache group.
        ledger: Where copies are recorded.
        index: What blocks of opted-in requests say.
        limits: What the model's calibration allows.
    """

    def __init__(
        self, group: ObservedGroup, ledger: TierLedger, index: SpanIndex, limits: SpliceLimits
    ) -> None:
        self._group, self._ledger = group, ledger
        self._index, self._limits = index, limits
        self._plans: dict[str, SplicePlan] = {}

    def plan(
        self, request: Request, domains: Callable[[], Collection[Domain]], first: int, exact: int
    ) -> SplicePlan:
        """Return what can be spliced behind what is exact; vLLM asks in every step that the request
        waits.

        Args:
            domains: Says whose text the request may use.
            first: Blocks that the pool holds.
            exact: Tokens behind them that exact copies bring.
        """
        loaded, known = exact // self._group.block_size, self._plans.get(request.request_id)
        if known is None or (known.first, known.loaded) != (first, loaded) or self._is_old(known):
            ledger, start = self._ledger, (first + loaded) * self._group.block_size
            pieces = self._cover(request, domains(), start, exact)
            lost, version = ledger.directory.lost, self._index.version
            known = SplicePlan(first, loaded, pieces, ledger.clock(), lost, version)
            self._plans[request.request_id] = known
        return known

    def spliced(self, request_id: str, to_load: int) -> int:
        """How many of the tokens that vLLM expects from a request's load are spliced."""
        if (plan := self._plans.get(request_id)) is None:
            return 0
        return plan.spliced if to_load > plan.loaded * self._group.block_size else 0

    def take(self, request_id: str) -> SplicePlan | None:
        """Take the plan of a request that is given its blocks, or ended."""
        return self._plans.pop(request_id, None)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def _is_old(self, plan: SplicePlan) -> bool:
        directory, version = self._ledger.directory, self._index.version
        if (plan.lost, plan.version) == (directory.lost, version):
            return False
        segments = (segment for piece in plan.pieces for segment in piece.segments)
        is_lost = any(directory.warm(segment.block_hash) is None for segment in segments)
        return is_lost or self._ledger.clock() - plan.at > _AGAIN_S

    def _cover(
        self, request: Request, domains: Collection[Domain], start: int, exact: int
    ) -> tuple[Piece, ...]:
        """Find what can be spliced from ``start`` on, if that is faster than to compute it."""
        if not domains:
            return ()
        directory, last = self._ledger.directory, request.num_tokens - 1
        behind = self._group.hashes(request, last)[start // self._group.block_size :]
        if last - start < self._limits.least_tokens or (not exact and directory.run(behind)):
            return ()  # the latter: there are exact copies, and computing was found to be faster

        def usable(block_hash: bytes) -> bool:
            return directory.warm(block_hash) is not None

        tokens = tokens_of(request, last)
        before = last_of(self._group.hashes(request, start))
        pieces = cover(self._index, domains, tokens, start, usable, self._limits, before)
        if not pieces:
            return ()
        read = sum(len(piece.segments) for piece in pieces) * self._ledger.block_bytes
        spliced = sum(piece.tokens for piece in pieces)
        worth = self._ledger.costs.worth_splicing(spliced, read, loads=bool(exact))
        return tuple(pieces) if worth else ()


def last_of(hashes: Sequence[bytes]) -> bytes:
    """The last hash; empty without any."""
    return hashes[-1] if hashes else b""


def tokens_of(request: Request, count: int) -> Tokens:
    """A request's first ``count`` tokens."""
    return np.array(request.all_token_ids[:count], dtype=np.int64)
