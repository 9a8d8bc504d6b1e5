"""Tells requests of live, resident sessions from those of new or cold ones."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....graph.waiting.holding_rule import new_context_blocks
from ..observe.observer import ObservedGroup
from ..observe.tags import Meaning
from .session_names import SessionName, SessionNames

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as admission sees it.

    Attributes:
        blocks: Blocks of new context; 0 for a live, resident session, and for a prompt shorter
            than one block.
        returning: Whether its session has been served here before.
        meaning: What its caller says.
    """

    blocks: int
    returning: bool
    meaning: Meaning


class LiveSessions:
    """Tells requests of live, resident sessions from those of new or cold ones.

    A session that was served here is resident if the middle block of its last context is still
    cached. A session without a name, or whose name is not reliable, is resident if half of the
    prompt is found.

    Args:
        pool: The live block pool.
        group: The observed KV cache group.
        read: What a request's caller says of it.
        copied: How many of these hashes, from the first on, a tier can bring back.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        read: Callable[[Request], Meaning],
        copied: Callable[[Sequence[bytes]], int],
    ) -> None:
        self._pool = pool
        self._group = group
        self._read = read
        self._copied = copied
        self._names = SessionNames()
        self._waiting: dict[str, tuple[SessionName, bool]] = {}  # by request, until scheduled
        self._queued: Counter[SessionName] = Counter()  # how many of each name these are
        self._running: dict[
            str, tuple[SessionName, bool]
        ] = {}  # by request, while it runs; the flag: its caller said that the session ends with it

    def arrived(self, request: Request) -> Arrival:
        """Assess a new request."""
        meaning = self._read(request)
        if meaning.session is not None:
            name = SessionName(meaning.tenant, meaning.session)
            self._names.arrived(name)
            self._dequeue(request.request_id)
            self._waiting[request.request_id] = name, meaning.session_ended
            self._queued[name] += 1
        return self._seen(request, meaning)

    def again(self, request: Request) -> Arrival:
        """Assess a request again that has arrived and still waits."""
        return self._seen(request, self._read(request))

    def scheduled(self, request_id: str) -> None:
        """Note that a request got blocks; counts only the first time, not after a preemption."""
        entry = self._dequeue(request_id)
        if entry is not None:
            self._running[request_id] = entry
            self._names.started(entry[0])

    def finished(self, request: Request) -> None:
        """Note that a request ended, in whatever state it was."""
        self._dequeue(request.request_id)
        entry = self._running.pop(request.request_id, None)
        if entry is not None:
            name, is_last = entry
            hashes = self._group.hashes(request, request.num_computed_tokens)
            middle = hashes[len(hashes) // 2] if hashes else None
            self._names.finished(name, middle, is_last)

    def _dequeue(self, request_id: str) -> tuple[SessionName, bool] | None:
        """Remove and return what waits of a request; None if nothing did."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._queued[entry[0]] -= 1
            if not self._queued[entry[0]]:
                del self._queued[entry[0]]
        return entry

    def _seen(self, request: Request, meaning: Meaning) -> Arrival:
        hashes = self._group.hashes(request, request.num_prompt_tokens)
        if meaning.session is None:
            return Arrival(self._by_prompt(request, hashes), False, meaning)
        name = SessionName(meaning.tenant, meaning.session)
        return Arrival(self._named(name, request, hashes), self._names.is_known(name), meaning)

    def _named(self, name: SessionName, request: Request, hashes: Sequence[bytes]) -> int:
        if self._names.is_new(name) and not _comes_from_elsewhere(request):
            return new_context_blocks(len(hashes), self._found(hashes), new=True)
        if self._names.is_one_session(name, self._queued[name]) and self._is_here(name):
            return 0
        return self._by_prompt(request, hashes)

    def _is_here(self, name: SessionName) -> bool:
        """Whether a session runs, or half of its last context is resident."""
        middle = self._names.middle(name)
        return self._names.is_running(name) or (middle is not None and bool(self._found([middle])))

    def _by_prompt(self, request: Request, hashes: Sequence[bytes]) -> int:
        if _comes_from_elsewhere(request):
            return 0
        return new_context_blocks(len(hashes), self._found(hashes), new=False)

    def _found(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain's blocks, from the first on, need not be computed.

        Blocks are evicted tail first, so a binary search finds where the cached prefix ends.
        """
        suffix, block_of = self._group.suffix, self._pool.cached_block_hash_to_block.get_one_block
        here = bisect_left(hashes, True, key=lambda each: block_of(each + suffix) is None)
        return here + self._copied(hashes[here:])


def _comes_from_elsewhere(request: Request) -> bool:
    """Whether another engine computed the prompt, and keeps its blocks until they are fetched."""
    params = request.kv_transfer_params
    return bool(params) and bool(params.get("do_remote_prefill"))
