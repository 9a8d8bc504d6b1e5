"""``OwnText``: what a session's approximate requests computed, for its later ones to splice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...recall.spans import NOBODYS, Domain, Piece, SpanIndex, Tokens
from .opt_in import OptIn, Owner

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_SHARED: Final = 3  # parts of a domain without a generation; see ``OptIn``


@dataclass(frozen=True, slots=True)
class Read:
    """What a request read before it computed, in tokens of its prompt.

    Attributes:
        exact: The first ones: the pool or copies held them exactly.
        found: With those that were found behind these among its session's own.
        spliced: Behind all those.
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
        self._reads: dict[str, Read] = {}
        self.enters = most_generations > 1

    def domains(self, request: Request, domain: Domain) -> list[Domain]:
        """Whose text a request in ``domain`` may use: exact text of the domain, and its session's
        own."""
        owner = self._opt_in.owner(request)
        if owner is None:
            return [domain]
        return [domain, *(_domain(owner, later) for later in range(1, self._most))]

    def begun(
        self, request: Request, exact: int, found: int, own: bytes, pieces: Sequence[Piece]
    ) -> None:
        """Note what a request reads before it computes, whenever it is given blocks.

        What it read first counts for as long as it has that: a preempted request finds its own
        blocks again. It does not where a load failed, or where more was found the next time.

        Args:
            exact: Tokens that were found exactly.
            found: Tokens that were found at all.
            own: Hash of the last block that was found behind the exact ones; empty without one.
            pieces: What is spliced behind those.
        """
        known = self._reads.get(request.request_id)
        if known is not None and not pieces and found >= known.found + known.spliced:
            return
        sources = [segment.block_hash for piece in pieces for segment in piece.segments]
        later = [1 + self._generation(each) for each in sources]
        generation = max([1, self._generation(own) if own else 0, *later])
        spliced = sum(piece.tokens for piece in pieces)
        self._reads[request.request_id] = Read(exact, found, spliced, generation)

    def read(self, request_id: str) -> Read | None:
        """What a request read; None before it was given blocks."""
        return self._reads.get(request_id)

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

    def forget(self, request_id: str) -> None:
        """Note that a request ended."""
        self._reads.pop(request_id, None)

    def _generation(self, block_hash: bytes) -> int:
        domain = self._index.domain(block_hash)
        if domain is None:
            return self._most  # forgotten: what is computed behind it is not entered
        return int(domain[-1]) if len(domain) > _SHARED else 0


def _domain(owner: Owner, generation: int) -> Domain:
    whose, session = owner
    return (*whose, session, str(generation))


# ``ExactOnly``: keeps what is approximate out of vLLM's prefix cache.


class ExactOnly:
    """Lets a request register its blocks only up to its first approximate token.

    vLLM registers whatever a request holds under hashes of its tokens, which say that it was
    computed behind exactly these tokens. Everything that enters the prefix cache, full blocks and
    parts of them, passes ``cache_blocks`` of its KV cache group's manager. That method is shadowed
    on the instance when the first request needs it, above whatever else follows the pool. It stays
    so when the rest of us leaves the engine: requests that are under way stay approximate.

    Args:
        manager: vLLM's record of which request holds which blocks.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._managers: list[Any] = list(manager.coordinator.single_type_managers)
        self._limits: dict[str, int] = {}
        self._attached = False

    def limit(self, request_id: str, tokens: int) -> None:
        """From now on, register only the request's first ``tokens`` tokens."""
        if not self._attached:
            for manager in self._managers:
                manager.cache_blocks = _limited(manager.cache_blocks, self._limits)
            self._attached = True
        self._limits[request_id] = min(tokens, self._limits.get(request_id, tokens))

    def exact_tokens(self, request_id: str) -> int | None:
        """How many of a request's tokens may be registered; None: all."""
        return self._limits.get(request_id)

    def forget(self, request_id: str) -> None:
        """Note that a request ended: it registers nothing any more."""
        self._limits.pop(request_id, None)


def _limited(original: Callable[..., None], limits: dict[str, int]) -> Callable[..., None]:
    def cache_blocks(request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        limit = limits.get(request.request_id)
        original(request, num_tokens if limit is None else min(limit, num_tokens), *args, **kwargs)

    return cache_blocks
