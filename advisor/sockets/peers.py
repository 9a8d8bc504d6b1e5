"""The processes that talk to the sidecar: a ``Peer`` said hello, ``Strangers`` did not yet,
``LostEngines`` went."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ...graph.messages.block_hashing import BlockHashing, hashing_of
from ...graph.messages.events import EngineHello
from .sequence import SequenceTracker

RESYNC_EVERY_S: Final = 0.5  # seconds between two requests, at least; chosen
_PATIENT_RESYNCS: Final = 4  # after so many in vain, the pauses between them double; chosen
_LONGEST_PAUSE_S: Final = 30.0
_REST: Final = 10.0  # seconds between two listings per second that the last one took; chosen
_STEADY_S: Final = 10.0  # in step for so long, an engine lost what it lost by chance; chosen
_STRANGERS: Final = 256  # identities whose last answer is remembered; chosen
_LOST: Final = 16  # engines that went are remembered, the last ones; chosen


@dataclass(slots=True)
class Peer:
    """One engine process that said hello.

    Attributes:
        engine: Stable id of the process, which anyone may know: see ``engine_id``.
        synced: Whether our picture of its residency is complete; advice is withheld until then.
        last_seen: When its last new batch arrived, in our clock's seconds.
        heard: How many of its batches the graph knows: those that it lost count.
    """

    identity: bytes
    hello: EngineHello
    last_seen: float
    sequence: SequenceTracker = field(default_factory=SequenceTracker)
    synced: bool = False
    heard: int = 0
    last_resync: float = float("-inf")
    resyncs: int = 0
    fruitless: int = 0  # resyncs since it was last in step for a while
    listed: float = float("-inf")  # when its last list of blocks was taken in
    listing_s: float = 0.0  # how long that took
    engine: str = field(init=False)

    def __post_init__(self) -> None:
        self.engine = engine_id(self.identity)

    @property
    def hashing(self) -> BlockHashing:
        """How it hashes blocks."""
        return BlockHashing(self.hello.engine, self.hello.model, hashing_of(self.hello))

    @property
    def resync_pause_s(self) -> float:
        """Seconds to wait before asking again: longer if asking did not help for long, and if it
        cost much."""
        doubled = min(max(0, self.fruitless - _PATIENT_RESYNCS), 10)
        pause_s = max(RESYNC_EVERY_S * 2**doubled, _REST * self.listing_s)
        return float(min(pause_s, _LONGEST_PAUSE_S))

    def lost_step(self, now: float) -> None:
        """Note that a batch is missing."""
        if self.synced and now - self.listed >= _STEADY_S:
            self.fruitless = 0
        self.synced = False


def engine_id(identity: bytes) -> str:
    """The public name of a socket identity, which must stay secret: whoever knew it could take the
    engine's place."""
    return hashlib.blake2b(identity, digest_size=8, person=b"kvgraph engine").hexdigest()


class Strangers:
    """Remembers when each was answered, so that none is answered all the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answered: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answered)

    def note_answer(self, identity: bytes) -> bool:
        """Note that one is answered now; False if it was answered just before, and must wait."""
        now = self._clock()
        if now - self._answered.get(identity, float("-inf")) < RESYNC_EVERY_S:
            return False
        self._answered[identity] = now
        self._answered.move_to_end(identity)
        if len(self._answered) > _STRANGERS:
            self._answered.popitem(last=False)
        return True

    def forget(self, identity: bytes) -> None:
        """Forget one that said hello."""
        self._answered.pop(identity, None)


class LostEngines:
    """Engines that went, or fell silent, and did not come back, by the names that they give
    themselves."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._went: dict[str, float] = {}  # the last to go is the last

    def went(self, name: str) -> None:
        """Note that an engine went."""
        self._went.pop(name, None)
        self._went[name] = self._clock()
        if len(self._went) > _LOST:
            del self._went[next(iter(self._went))]

    def came(self, name: str) -> None:
        """Note that an engine is there."""
        self._went.pop(name, None)

    def ago(self) -> dict[str, float]:
        """Seconds since each went, by name; on any thread."""
        now = self._clock()
        return {name: now - at for name, at in self._went.copy().items()}
