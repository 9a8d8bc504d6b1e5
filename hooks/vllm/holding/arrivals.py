"""Tells requests of live, resident sessions from those of new or cold ones."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....graph.waiting.holding_rule import new_context_blocks
from ..hints.tags import Meaning
from ..observe.group import ObservedGroup
from .session_names import Middle, SessionName, SessionNames, middle_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as admission sees it.

    Attributes:
        blocks: Blocks of new context; 0 for a live, resident session, and for a short prompt.
        returning: Whether its session has been served here before.
        meaning: What its caller says.
    """

    blocks: int
    returning: bool
    meaning: Meaning


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is remembered of a request that bears a session's name.

    Attributes:
        prompt: The middle of its prompt.
        is_last: Whether its caller said that the session ends with it.
    """

    name: SessionName
    prompt: Middle | None
    is_last: bool


class LiveSessions:
    """Tells requests of live, resident sessions from those of new or cold ones.

    A session that was served here is resident for a prompt that goes on with at least half of one
    of its last contexts, if that one's first and middle block are still cached, and for a prompt
    that goes on with half of one that runs. A session without a name, or whose name is not
    reliable, and any other prompt under its name, is resident if half of the prompt is found.

    Args:
        pool: The live block pool.
        group: The observed KV cache group.
        read: What a request's caller says of it.
        copied: How many of these hashes, from the first on, a tier can bring back.
        fetches: Whether this engine gets prompts' blocks from engines that computed them; else a
            caller that says so of a request is not believed.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        read: Callable[[Request], Meaning],
        copied: Callable[[Sequence[bytes]], int],
        fetches: bool = False,
    ) -> None:
        self._pool, self._fetches = pool, fetches
        self._group = group
        self._read = read
        self._copied = copied
        self._names = SessionNames()
        self._waiting: dict[str, _Asked] = {}  # by request, until scheduled
        self._queued: Counter[SessionName] = Counter()  # how many of each name these are
        self._running: dict[str, _Asked] = {}  # by request, while it runs

    def arrived(self, request: Request) -> Arrival:
        """Assess a new request."""
        meaning = self._read(request)
        hashes = self._group.hashes(request, request.num_prompt_tokens)
        if meaning.session is not None:
            name = SessionName(meaning.tenant, meaning.session)
            self._names.arrived(name)
            self._dequeue(request.request_id)
            asked = _Asked(name, middle_of(hashes), meaning.session_ended)
            self._waiting[request.request_id] = asked
            self._queued[name] += 1
        return self._seen(request, meaning, hashes)

    def again(self, request: Request) -> Arrival:
        """Assess a request again that has arrived and still waits."""
        hashes = self._group.hashes(request, request.num_prompt_tokens)
        return self._seen(request, self._read(request), hashes)

    def scheduled(self, request_id: str) -> None:
        """Note that a request got blocks; counts only the first time, not after a preemption."""
        entry = self._dequeue(request_id)
        if entry is not None:
            self._running[request_id] = entry
            self._names.started(entry.name, entry.prompt)

    def finished(self, request: Request) -> None:
        """Note that a request ended, in whatever state it was."""
        self._dequeue(request.request_id)
        entry = self._running.pop(request.request_id, None)
        if entry is not None:
            hashes = self._group.hashes(request, request.num_computed_tokens)
            self._names.finished(entry.name, hashes, entry.is_last)

    def _dequeue(self, request_id: str) -> _Asked | None:
        """Remove and return what waits of a request; None if nothing did."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._queued[entry.name] -= 1
            if not self._queued[entry.name]:
                del self._queued[entry.name]
        return entry

    def _seen(self, request: Request, meaning: Meaning, hashes: Sequence[bytes]) -> Arrival:
        if meaning.session is None:
            return Arrival(self._by_prompt(request, hashes), False, meaning)
        name = SessionName(meaning.tenant, meaning.session)
        return Arrival(self._named(name, request, hashes), self._is_known(name, hashes), meaning)

    def _named(self, name: SessionName, request: Request, hashes: Sequence[bytes]) -> int:
        if self._names.is_new(name) and not self._comes_from_elsewhere(request):
            return self._new_context(hashes, new=True)
        if self._names.is_one_session(name, self._queued[name]) and self._is_here(name, hashes):
            return 0
        return self._by_prompt(request, hashes)

    def _is_known(self, name: SessionName, hashes: Sequence[bytes]) -> bool:
        """Whether a prompt goes on with a context of its session that was served here."""
        names = self._names
        return names.is_running(name, hashes) or names.context(name, hashes) is not None

    def _is_here(self, name: SessionName, hashes: Sequence[bytes]) -> bool:
        """Whether a prompt goes on with one that runs, or with a context that is resident."""
        if self._names.is_running(name, hashes):
            return True
        middle = self._names.context(name, hashes)
        return middle is not None and self._found((hashes[0], middle.hash)) == 2

    def _by_prompt(self, request: Request, hashes: Sequence[bytes]) -> int:
        if self._comes_from_elsewhere(request):
            return 0
        return self._new_context(hashes, new=False)

    def _new_context(self, hashes: Sequence[bytes], *, new: bool) -> int:
        pool = self._pool.num_gpu_blocks - 1
        return new_context_blocks(len(hashes), self._found(hashes), pool, new=new)

    def _found(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain's blocks, from the first on, need not be computed.

        Blocks are evicted tail first, so a binary search finds where the cached prefix ends. What
        a ranking broke is not counted where its first block is gone: nothing of it can be matched.
        """
        suffix, block_of = self._group.suffix, self._pool.cached_block_hash_to_block.get_one_block
        here = 0
        if hashes and block_of(hashes[0] + suffix) is not None:
            here = bisect_left(hashes, True, key=lambda each: block_of(each + suffix) is None)
        return here + self._copied(hashes[here:])

    def _comes_from_elsewhere(self, request: Request) -> bool:
        """Whether another engine computed the prompt, and keeps its blocks until they are
        fetched."""
        params = request.kv_transfer_params or {}
        return self._fetches and bool(params.get("do_remote_prefill"))
