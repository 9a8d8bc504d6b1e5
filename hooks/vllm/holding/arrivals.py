"""``LiveSessions``: tells requests of live, resident sessions from new or cold ones."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ....graph.admission import is_short, new_context_blocks
from ...requests.hints import CheckedHints
from ..groups import ObservedGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

_MOST_SESSIONS: Final = 65_536  # remembered; the one idle longest is forgotten first; chosen
_MOST_AT_ONCE: Final = 8  # requests of one session; a name with more is shared by several. Chosen
_SHARE: Final = 1 / 256  # weight of the newest request in the running share of known names; chosen
_TRUSTED: Final = 0.25
"""If a smaller share of requests has a name that was seen before, names are taken for request ids
and not trusted. A session of two requests gives 0.5. Chosen."""
_MOST_CONTEXTS: Final = 4  # remembered per name: a session's own, and its subagents'. Chosen


class SessionName(NamedTuple):
    tenant: str | None
    session: str


class Midpoint(NamedTuple):
    """The index and hash of the block halfway through a context; any prompt that continues the
    context contains it.

    A name alone does not identify a prompt: subagents share their session's name, and others may
    too.
    """

    at: int
    hash: bytes

    def is_in(self, hashes: Sequence[bytes]) -> bool:
        """Return whether a prompt of these blocks continues at least half of the context."""
        return self.at < len(hashes) and hashes[self.at] == self.hash

    def is_most_of(self, hashes: Sequence[bytes]) -> bool:
        """Return ``is_in``, if the context also makes up at least half of the prompt."""
        return 2 * (2 * self.at + 1) >= len(hashes) and self.is_in(hashes)


def midpoint_of(hashes: Sequence[bytes]) -> Midpoint | None:
    """Return the midpoint of a context of these blocks; None if it has no block."""
    half = len(hashes) // 2
    return Midpoint(half, hashes[half]) if hashes else None


@dataclass(slots=True)
class _SessionRecord:
    running: int = 0
    prompt: Midpoint | None = None  # midpoint of the last prompt that was scheduled
    contexts: tuple[Midpoint, ...] = ()  # of ended contexts that no other continues; newest first


class SessionNames:
    """Remembers named sessions between their requests."""

    def __init__(self) -> None:
        self._known: OrderedDict[SessionName, _SessionRecord] = OrderedDict()
        self._returning_share = 1.0  # share of names that were here before

    def arrived(self, name: SessionName) -> None:
        known = name in self._known
        self._returning_share += _SHARE * (known - self._returning_share)
        if known:
            self._known.move_to_end(name)

    def is_new(self, name: SessionName) -> bool:
        """Return whether ``name`` was never scheduled; False while names look like request ids."""
        return name not in self._known and self._returning_share >= _TRUSTED

    def is_one_session(self, name: SessionName, waiting: int) -> bool:
        """Return whether so few requests have this ``name`` that it may be one session."""
        known = self._known.get(name)
        return known is not None and known.running + waiting <= _MOST_AT_ONCE

    def is_running(self, name: SessionName, hashes: Sequence[bytes]) -> bool:
        """Return whether ``name`` is running, and its newest prompt is most of this one."""
        known = self._known.get(name)
        if known is None or not known.running or known.prompt is None:
            return False
        return known.prompt.is_most_of(hashes)

    def context(self, name: SessionName, hashes: Sequence[bytes]) -> Midpoint | None:
        """Return the midpoint of the context of ``name`` that makes up most of a prompt; None if
        there is none. So admitting a short request does not admit a long one of the same name.
        """
        known = self._known.get(name)
        contexts = known.contexts if known is not None else ()
        return next((each for each in contexts if each.is_most_of(hashes)), None)

    def started(self, name: SessionName, prompt: Midpoint | None) -> None:
        known = self._known.setdefault(name, _SessionRecord())
        known.running += 1
        known.prompt = prompt
        self._known.move_to_end(name)
        if len(self._known) > _MOST_SESSIONS:
            self._known.popitem(last=False)

    def finished(self, name: SessionName, hashes: Sequence[bytes], ended: bool) -> None:
        """Note that a scheduled request of ``name``, with full blocks of these ``hashes``, ended,
        and whether the session ended with it.
        """
        known = self._known.get(name)
        if known is None:
            return
        known.running = max(0, known.running - 1)
        middle = midpoint_of(hashes)
        if middle is not None:
            others = (each for each in known.contexts if not each.is_in(hashes))
            known.contexts = (middle, *others)[:_MOST_CONTEXTS]
        if ended and not known.running:
            del self._known[name]


class RequestArrival(NamedTuple):
    """What admission needs to know about a request."""

    blocks: int  # blocks of new context; 0 for a live, resident session, and for a short prompt
    returning: bool  # whether its session has been served here before
    meaning: CheckedHints


@dataclass(frozen=True, slots=True)
class _NamedRequest:
    """A named request: its prompt's midpoint, and whether the session ends with it."""

    name: SessionName
    prompt: Midpoint | None
    is_last: bool


class LiveSessions:
    """Tells requests of live, resident sessions from new or cold ones.

    A session that was served here is resident for a prompt that continues at least half of a
    running context, or of a recent one whose first and middle block are still cached, and that is
    at most twice as long as this context. Any other prompt is resident if half of it is found.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        read: Callable[[Request], CheckedHints],
        # how many of these hashes, from the first on, a tier can bring back; None: no tiers
        copied: Callable[[Sequence[bytes]], int] | None,
        fetches: bool = False,  # whether what a request says of blocks elsewhere counts
    ) -> None:
        self._pool, self._fetches = pool, fetches
        self._group = group
        self._read = read
        self._copied = copied
        self._names = SessionNames()
        self._waiting: dict[str, _NamedRequest] = {}  # by request, until scheduled
        self._queued: Counter[SessionName] = Counter()  # how many of each name these are
        self._running: dict[str, _NamedRequest] = {}  # by request, while it runs

    def arrived(self, request: Request) -> RequestArrival:
        meaning = self._read(request)
        hashes = self._group.hashes(request, request.num_prompt_tokens)
        if meaning.session is not None:
            name = SessionName(meaning.tenant, meaning.session)
            self._names.arrived(name)
            self._dequeue(request.request_id)
            asked = _NamedRequest(name, midpoint_of(hashes), meaning.session_ended)
            self._waiting[request.request_id] = asked
            self._queued[name] += 1
        return self._seen(request, meaning, hashes)

    def reassess(self, request: Request) -> RequestArrival:
        hashes = self._group.hashes(request, request.num_prompt_tokens)
        return self._seen(request, self._read(request), hashes)

    def queued(self, request: Request) -> tuple[int, int]:
        """Return a waiting prompt's number of blocks, and how many of these its session's last turn
        had but the pool no longer has.
        """
        hashes = self._group.hashes(request, request.num_prompt_tokens)
        entry = self._waiting.get(request.request_id)
        context = None if entry is None else self._names.context(entry.name, hashes)
        if context is None:
            return len(hashes), 0
        had = min(len(hashes), 2 * context.at)
        return len(hashes), max(0, had - self._found(hashes))

    def scheduled(self, request_id: str) -> None:
        """Note that a request was given blocks, the first time, not after a preemption."""
        entry = self._dequeue(request_id)
        if entry is not None:
            self._running[request_id] = entry
            self._names.started(entry.name, entry.prompt)

    def finished(self, request: Request) -> None:
        """Note that a request ended, whatever its state."""
        self._dequeue(request.request_id)
        entry = self._running.pop(request.request_id, None)
        if entry is not None:
            hashes = self._group.hashes(request, request.num_computed_tokens)
            self._names.finished(entry.name, hashes, entry.is_last)

    def _dequeue(self, request_id: str) -> _NamedRequest | None:
        """Remove and return a waiting request; None if it did not wait."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._queued[entry.name] -= 1
            if not self._queued[entry.name]:
                del self._queued[entry.name]
        return entry

    def _seen(
        self, request: Request, meaning: CheckedHints, hashes: Sequence[bytes]
    ) -> RequestArrival:
        if meaning.session is None:
            return RequestArrival(self._by_prompt(request, hashes), False, meaning)
        name = SessionName(meaning.tenant, meaning.session)
        return RequestArrival(
            self._named(name, request, hashes), self._is_known(name, hashes), meaning
        )

    def _named(self, name: SessionName, request: Request, hashes: Sequence[bytes]) -> int:
        if self._names.is_new(name) and not self._comes_from_elsewhere(request):
            return self._new_context(hashes, new=True)
        if self._names.is_one_session(name, self._queued[name]) and self._is_here(name, hashes):
            return 0
        return self._by_prompt(request, hashes)

    def _is_known(self, name: SessionName, hashes: Sequence[bytes]) -> bool:
        """Return whether a prompt continues a context of its session that was served here."""
        names = self._names
        return names.is_running(name, hashes) or names.context(name, hashes) is not None

    def _is_here(self, name: SessionName, hashes: Sequence[bytes]) -> bool:
        """Return whether a prompt continues a running one, or a resident context."""
        if self._names.is_running(name, hashes):
            return True
        middle = self._names.context(name, hashes)
        return middle is not None and self._found((hashes[0], middle.hash)) == 2

    def _by_prompt(self, request: Request, hashes: Sequence[bytes]) -> int:
        if self._fetches and self._comes_from_elsewhere(request):
            return 0
        return self._new_context(hashes, new=False)

    def _new_context(self, hashes: Sequence[bytes], *, new: bool) -> int:
        pool = self._pool.num_gpu_blocks - 1
        if is_short(len(hashes), pool):
            return 0  # whatever is found of it
        return new_context_blocks(len(hashes), self._found(hashes), pool, new=new)

    def _found(self, hashes: Sequence[bytes]) -> int:
        """Return how many of a chain's blocks, from the first on, need not be computed."""
        # Blocks are evicted tail first, so a binary search finds where the cached prefix ends. A
        # chain that lost its first block to a ranking does not count: nothing of it is matched.
        suffix, block_of = self._group.suffix, self._pool.cached_block_hash_to_block.get_one_block
        here = 0
        if hashes and block_of(hashes[0] + suffix) is not None:
            here = bisect_left(hashes, True, key=lambda each: block_of(each + suffix) is None)
        return here if self._copied is None else here + self._copied(hashes[here:])

    def _comes_from_elsewhere(self, request: Request) -> bool:
        """Return whether another engine computed the prompt and keeps its blocks for fetching."""
        params = request.kv_transfer_params or {}
        return self._fetches and bool(params.get("do_remote_prefill"))
