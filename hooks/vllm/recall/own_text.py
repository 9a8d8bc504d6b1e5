"""``OwnText``: what a session's approximate requests computed, for its later ones to splice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...recall.fingerprints import Tokens
from ...recall.said_blocks import Domain
from ...recall.span_index import NOBODYS, Piece, SpanIndex
from .opt_in import OptIn
from .own_branch import Owner

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SHARED: Final = 2  # parts of a domain that sessions share: salt and tenant; see ``OptIn``


@dataclass(frozen=True, slots=True)
class _Read:
    """What a request read before it computed.

    Attributes:
        exact: Tokens that the pool or exact copies held.
        found: Tokens up to the end of the session's approximate blocks behind those.
        spliced: Tokens behind those.
        generation: Of what is computed behind them, where exact text is of generation 0.
    """

    exact: int
    found: int
    spliced: int
    generation: int


class OwnText:
    """Enters what was computed behind spliced text, in domains of the session alone.

    Each generation has a domain of its own, so that one lookup asks whose text it is and how stale.
    Spliced tokens are not entered: where they come from is known, and keys are turned once only.

    Args:
        index: What blocks say.
        block_size: Tokens of a block.
        opt_in: Whose requests they are.
        most_generations: See ``SpliceLimits``.

    Attributes:
        enters: Whether anything is entered at all.
    """

    def __init__(
        self, index: SpanIndex, block_size: int, opt_in: OptIn, most_generations: int
    ) -> None:
        self._index, self._size = index, block_size
        self._opt_in, self._most = opt_in, most_generations
        self._before: dict[str, int] = {}  # generations of what sessions left, by request
        self._reads: dict[str, _Read] = {}
        self.enters = most_generations > 1

    def domains(self, request: Request, domain: Domain) -> list[Domain]:
        """Whose text a request in ``domain`` may use: exact text of the domain, and its session's
        own."""
        owner = self._opt_in.owner(request)
        if owner is None:
            return [domain]
        return [domain, *(_domain(owner, later) for later in range(1, self._most))]

    def goes_on(self, request: Request, generation: int) -> None:
        """Note that a request goes on from what its session left, which is of ``generation``."""
        self._before[request.request_id] = generation

    def begun(self, request: Request, exact: int, found: int, pieces: Sequence[Piece]) -> None:
        """Note what a request reads before it computes.

        Args:
            exact: Tokens that were found exactly.
            found: Tokens up to the end of what else was found: its session's approximate blocks.
            pieces: What is spliced behind those.
        """
        behind = [segment.block_hash for piece in pieces for segment in piece.segments]
        later = [1 + self._generation_of(each) for each in behind]
        before = self._before.get(request.request_id, 0) if found > exact else 0
        generation = max([1, before, *later])
        spliced = sum(piece.tokens for piece in pieces)
        self._reads.setdefault(request.request_id, _Read(exact, found, spliced, generation))

    def keep(self, request: Request, hashes: Sequence[bytes], tokens: Tokens, exact: int) -> None:
        """Enter what a request computed behind its exact blocks.

        Args:
            hashes: Of all its whole blocks.
            tokens: Of these.
            exact: How many of them are exact.
        """
        read, owner = self._reads.get(request.request_id), self._opt_in.owner(request)
        if exact == len(hashes) or read is None or owner is None or read.generation >= self._most:
            return
        mine = tokens.copy()
        mine[read.found : read.found + read.spliced] = NOBODYS
        domain = _domain(owner, read.generation)
        self._index.add(domain, hashes, mine, first=read.found // self._size)

    def generation(self, request: Request) -> int:
        """Of what a request computed behind approximate text; the latest where that is unknown."""
        read = self._reads.get(request.request_id)
        return self._most if read is None else read.generation

    def worth_copies(self, request: Request, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Those of a request's blocks that say what no copy says: the exact ones, and those that it
        computed.

        Args:
            hashes: Of its blocks, from its first on.
        """
        read = self._reads.get(request.request_id)
        if read is None:
            return hashes
        first, end = read.exact // self._size, (read.found + read.spliced) // self._size
        return [*hashes[:first], *hashes[end:]]

    def forget(self, request_id: str) -> None:
        """Note that a request ended."""
        self._before.pop(request_id, None)
        self._reads.pop(request_id, None)

    def _generation_of(self, block_hash: bytes) -> int:
        domain = self._index.domain(block_hash)
        if domain is None:
            return self._most  # forgotten: what is computed behind it is not entered
        return int(domain[-1]) if len(domain) > _SHARED else 0


def _domain(owner: Owner, generation: int) -> Domain:
    whose, session = owner
    return (*whose, session, str(generation))
