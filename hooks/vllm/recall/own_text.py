"""Lets a session, and nobody else, splice what its own approximate requests computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...recall.spans import UNFINDABLE, Domain, Piece, SpanIndex, Tokens
from .opt_in import OptIn, Owner

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_SHARED: Final = 3  # parts of a domain without a generation; see ``OptIn``


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Where the start of a request's prompt came from, in tokens."""

    exact: int  # held exactly by the pool or by copies
    found: int  # ``exact`` plus the session's own blocks found after them
    spliced: int  # spliced after ``found``
    generation: int  # generation of what is computed after that; exact text has generation 0


class OwnText:
    """Indexes what a session computes after spliced text, in domains that only the session can use.

    Each generation has its own domain, so that one lookup checks both owner and generation. Spliced
    tokens are not indexed: their source is, and keys are rotated only once.
    """

    def __init__(
        self, index: SpanIndex, block_size: int, opt_in: OptIn, most_generations: int
    ) -> None:
        self._index, self._size = index, block_size
        self._opt_in, self._most = opt_in, most_generations
        self._reads: dict[str, PromptSources] = {}
        self.enters = most_generations > 1  # whether anything is indexed at all

    def domains(self, request: Request, domain: Domain) -> list[Domain]:
        """Return the domains that a request may use: ``domain``, and its session's own."""
        owner = self._opt_in.owner(request)
        if owner is None:
            return [domain]
        return [domain, *(_domain(owner, later) for later in range(1, self._most))]

    def begun(
        self, request: Request, exact: int, found: int, own: bytes, pieces: Sequence[Piece]
    ) -> None:
        """Note the sources of a request's prompt, each time it is given blocks. ``exact`` tokens
        were found exactly, ``found`` in all; ``own`` is the hash of the last block found after the
        exact ones, if any; ``pieces`` are spliced after that.

        The first note stays valid across preemptions, when a request finds its own blocks again. It
        is replaced if a load failed or more was found the next time.
        """
        known = self._reads.get(request.request_id)
        if known is not None and not pieces and found >= known.found + known.spliced:
            return
        sources = [segment.block_hash for piece in pieces for segment in piece.segments]
        later = [1 + self._generation(each) for each in sources]
        generation = max([1, self._generation(own) if own else 0, *later])
        spliced = sum(piece.tokens for piece in pieces)
        self._reads[request.request_id] = PromptSources(exact, found, spliced, generation)

    def read(self, request_id: str) -> PromptSources | None:
        return self._reads.get(request_id)

    def keep(self, request: Request, hashes: Sequence[bytes], tokens: Tokens, exact: int) -> None:
        """Index what a request computed after its exact blocks."""
        read, owner = self._reads.get(request.request_id), self._opt_in.owner(request)
        if exact == len(hashes) or read is None or owner is None or read.generation >= self._most:
            return
        mine = tokens.copy()
        mine[read.found : read.found + read.spliced] = UNFINDABLE
        domain = _domain(owner, read.generation)
        self._index.add(domain, hashes, mine, first=read.found // self._size)

    def forget(self, request_id: str) -> None:
        self._reads.pop(request_id, None)

    def _generation(self, block_hash: bytes) -> int:
        domain = self._index.domain(block_hash)
        if domain is None:
            return self._most  # unknown: do not index what is computed after it
        return int(domain[-1]) if len(domain) > _SHARED else 0


def _domain(owner: Owner, generation: int) -> Domain:
    whose, session = owner
    return (*whose, session, str(generation))


class ExactOnly:
    """Keeps a request's approximate blocks out of vLLM's prefix cache.

    vLLM registers blocks under hashes of their tokens, which promise that the blocks were computed
    after exactly these tokens. Every registration goes through ``cache_blocks`` of the KV cache
    group's manager, so that method is patched on the instance when the first request needs it. The
    patch stays when the rest of kvgraph detaches, because running requests stay approximate.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._managers: list[Any] = list(manager.coordinator.single_type_managers)
        self._limits: dict[str, int] = {}
        self._attached = False

    def limit(self, request_id: str, tokens: int) -> None:
        """Register only the request's first ``tokens`` tokens from now on."""
        if not self._attached:
            for manager in self._managers:
                manager.cache_blocks = _limited(manager.cache_blocks, self._limits)
            self._attached = True
        self._limits[request_id] = min(tokens, self._limits.get(request_id, tokens))

    def exact_tokens(self, request_id: str) -> int | None:
        """Return how many of a request's tokens may be registered; None for all."""
        return self._limits.get(request_id)

    def forget(self, request_id: str) -> None:
        self._limits.pop(request_id, None)


def _limited(original: Callable[..., None], limits: dict[str, int]) -> Callable[..., None]:
    def cache_blocks(request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        limit = limits.get(request.request_id)
        original(request, num_tokens if limit is None else min(limit, num_tokens), *args, **kwargs)

    return cache_blocks
