"""``StoreLookup``: asks the shared store which blocks of a prompt it holds."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ....graph.messages.block_hashing import hashing_of
from ....graph.messages.events import EngineHello
from ...store.hashing_mark import mark_hashing
from ...store.sealed_records import store_key
from ...store.shared_store import SharedStore
from ...store.store_breaker import StoreBreaker
from ...tiers.lanes.task_thread import TaskThread

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 0.25  # that a request waits for the store's word; chosen
_AT_ONCE: Final = 64  # blocks that the store is asked for in one call; chosen
_MOST_BLOCKS: Final = 65_536  # of a prompt that are asked for; chosen
_OTHERWISE: Final = (
    "kvgraph: another engine of %r on this shared store has %r, this one %r: they find nothing of "
    "each other's there"
)


@dataclass(slots=True, eq=False)
class _Ask:
    """One request's question.

    Attributes:
        found: How many of ``hashes``, from the first on, are there; None: no answer yet.
        wanted: Whether somebody still waits.
    """

    hashes: Sequence[bytes]
    asked_at: float
    found: int | None = None
    wanted: bool = True


class StoreLookup:
    """Asks once per request, on a thread of its own; the engine's thread never waits.

    Args:
        store: What is asked.
        clock: Monotonic seconds, of the engine.

    Attributes:
        names: What each worker calls its records; before they are known, nothing is asked.
    """

    def __init__(self, store: SharedStore, clock: Callable[[], float]) -> None:
        self.names: list[str] = []
        self._store, self._clock = store, clock
        self._asks: dict[str, _Ask] = {}
        self._pending: deque[_Ask] = deque()  # that the thread has not answered, the oldest first
        self._breaker = StoreBreaker(time.monotonic)
        self._thread = TaskThread("kvgraph-store-look")

    @property
    def answered(self) -> bool:
        """Whether the store owes no answer."""
        return not self._pending

    def mark(self, hello: Callable[[], EngineHello]) -> None:
        """Tell other engines on the store, and learn from them, how blocks are hashed; one line
        in the log where that is not alike. ``hello`` is called on the thread."""
        if self.names:
            self._thread.put(lambda: self._mark(hello()))

    def asked(self, request_id: str) -> bool:
        """Whether the store was asked for a request."""
        return request_id in self._asks

    def ask(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Ask which of ``hashes`` the store has, from the first on; not while it does not
        answer."""
        ask = self._asks[request_id] = _Ask(hashes[:_MOST_BLOCKS], self._clock())
        if not self.names or self._breaker.rests or self._hangs():
            ask.found = 0
            return
        self._pending.append(ask)
        self._thread.put(lambda: self._look(ask))

    def waits(self, request_id: str) -> bool:
        """Whether the answer for a request is worth waiting for."""
        ask = self._asks[request_id]
        if ask.found is None and self._clock() - ask.asked_at > PATIENCE_S:
            ask.wanted = False
        return ask.found is None and ask.wanted

    def take(self, request_id: str) -> tuple[Sequence[bytes], Sequence[bytes]] | None:
        """Take the answer for a request, once: what was asked for, and which of it, from the first
        on, is there. None if it was taken, or did not come in time."""
        ask = self._asks[request_id]
        if not ask.wanted or ask.found is None:
            return None
        ask.wanted = False
        return ask.hashes, ask.hashes[: ask.found]

    def there(self, request_id: str) -> Sequence[bytes]:
        """Return what was found for a request."""
        ask = self._asks.get(request_id)
        return ask.hashes[: ask.found or 0] if ask is not None else ()

    def forget(self, request_id: str) -> None:
        """Forget a request that ended. Until then it is asked for once: where a load fails, vLLM
        looks up again, and would for ever."""
        ask = self._asks.pop(request_id, None)
        if ask is not None:
            ask.wanted = False

    def distrust(self) -> None:
        """Ask nothing for a while: what the store has it does not give."""
        self._breaker.failed()

    def end(self) -> None:
        """Let the store go as soon as it answers; nobody waits for that."""
        self._thread.put(self._store.close)

    def _hangs(self) -> bool:
        oldest = next(iter(self._pending.copy()), None)  # the thread takes from it meanwhile
        return oldest is not None and self._clock() - oldest.asked_at > PATIENCE_S

    # On the thread ------------------------------------------------------------------------------

    def _mark(self, hello: EngineHello) -> None:
        try:
            other = mark_hashing(self._store, hello)
        except OSError:
            self._breaker.failed()
            return
        if other is not None:
            logger.warning(_OTHERWISE, hello.model, other, hashing_of(hello))

    def _look(self, ask: _Ask) -> None:
        began, found = time.monotonic(), 0
        try:
            if ask.wanted and self._breaker.allows():
                found = self._run(ask)
                self._breaker.succeeded(time.monotonic() - began)
        except OSError:
            self._breaker.failed()
        finally:
            ask.found = found
            self._pending.popleft()

    def _run(self, ask: _Ask) -> int:
        """How many blocks are there, from the first on, for every worker."""
        for start in range(0, len(ask.hashes), _AT_ONCE):
            hashes = ask.hashes[start : start + _AT_ONCE]
            keys = [store_key(name, each) for each in hashes for name in self.names]
            there = self._store.holds(keys)
            if not ask.wanted:
                return 0
            if False in there:
                return start + there.index(False) // len(self.names)
        return len(ask.hashes)
