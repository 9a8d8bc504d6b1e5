"""``SealedRecords``: a worker's records in a shared store, each sealed with its block's hash."""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ...graph.wire.events import EngineHello, hashing_of
from ..threads import Once
from .stores import SharedStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer, WriteableBuffer

SLOW_S: Final = 0.5  # a slower call counts as failed; chosen
_FIRST_REST_S: Final = 1.0  # chosen
_LONGEST_REST_S: Final = 30.0  # rests double up to this; chosen


class StoreBreaker:
    """A circuit breaker: opens after a call that failed or was slow, then lets one call through as
    a trial. Any thread may call it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._rest_s, self._until = 0.0, float("-inf")
        self._tries = False  # whether a trial call is under way
        self.broken = 0  # how often it opened

    def allows(self) -> bool:
        """Return whether the store may be called; after a pause, only the first who asks may."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                return False
            if self._rest_s:
                self._until, self._tries = now + self._rest_s, True  # unless this one succeeds
            return True

    @property
    def rests(self) -> bool:
        """Whether the breaker is open now; asking does not use up the trial call."""
        return self._clock() < self._until

    def succeeded(self, seconds: float) -> None:
        if seconds > SLOW_S:
            self.failed()
            return
        with self._lock:
            self._rest_s, self._until, self._tries = 0.0, float("-inf"), False

    def failed(self) -> None:
        """Note that a call failed; of several calls running at once, only the first counts."""
        with self._lock:
            if self._clock() < self._until and not self._tries:
                return
            self._rest_s = min(2 * self._rest_s or _FIRST_REST_S, _LONGEST_REST_S)
            self._until, self._tries = self._clock() + self._rest_s, False
            self.broken += 1


logger = logging.getLogger(__name__)

_SEAL: Final = struct.Struct("<8s32sQI")  # magic, key, bytes of the record, checksum of all
_MAGIC: Final = b"KVGSTOR1"
_HASH_BYTES: Final = 32  # of the longest hash that names a block, as in the seal
_FAILED: Final = (
    "kvgraph: the shared store failed (%s); it rests for some seconds, and blocks are computed"
)
_DAMAGED: Final = (
    "kvgraph: the shared store gave bytes that are not the block that was asked for; they are not "
    "used, and further ones are only counted"
)


class SealedRecords:
    """Records of one size, in a store that may return something other than what was stored.

    A seal before each record holds the key and a checksum of both. It guards against damage and
    mistakes, not against an attacker who can write to the store. Any thread may use it.

    ``name`` is a digest of everything except the block that the bytes depend on; part of every key.
    """

    def __init__(
        self, store: SharedStore, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Writing has a breaker of its own: a full store can be read.
        self.breaker, self._writing = StoreBreaker(clock), StoreBreaker(clock)
        self.damaged = 0  # records whose bytes did not match their seal
        self.spared = 0  # records that were there already and were not sent again
        self._store, self._name, self._clock = store, name, clock
        self._seed = zlib.crc32(name.encode())
        self._disowned = False
        self._once = Once(logger)

    def write(self, key: bytes, record: ReadableBuffer) -> bool:
        """Store ``record`` unless it is there already; returns False if the store refuses it."""
        if self._disowned or self.breaker.rests or not self._writing.allows():
            return False
        name = store_key(self._name, key)
        with self._watched(self._writing):
            if self._store.holds([name])[0]:
                self.spared += 1
            else:
                self._store.put(name, [self._seal(key, record), record])
            return True
        return False

    def read(self, key: bytes, into: WriteableBuffer) -> bool:
        """Read a record; False, with ``into`` undefined, if none is intact."""
        if self._disowned or not self.breaker.allows():
            return False
        name, seal = store_key(self._name, key), bytearray(_SEAL.size)
        with self._watched(self.breaker):
            if not self._store.get(name, [seal, into]):
                return False
            if seal == self._seal(key, into):
                return True
            self.damaged += 1
            self._once.warn("damaged", _DAMAGED)
            self._store.remove(name)
        return False

    def remove(self, key: bytes) -> None:
        if self._writing.allows():
            with self._watched(self._writing):
                self._store.remove(store_key(self._name, key))

    def disown(self) -> None:
        """Stop reading and writing: the weights may no longer be those that the name states."""
        self._disowned = True

    def close(self) -> None:
        self._store.close()

    def _seal(self, key: bytes, record: ReadableBuffer) -> bytes:
        size = memoryview(record).nbytes
        checksum = zlib.crc32(record, zlib.crc32(key, self._seed))
        return _SEAL.pack(_MAGIC, key, size, checksum)

    @contextmanager
    def _watched(self, breaker: StoreBreaker) -> Iterator[None]:
        """Report the calls inside to a breaker, and suppress their errors."""
        began = self._clock()
        try:
            yield
        except OSError as error:
            breaker.failed()
            self._once.warn("failed", _FAILED, error.strerror or str(error) or type(error).__name__)
        else:
            breaker.succeeded(self._clock() - began)


def store_key(name: str, block_hash: bytes) -> str:
    return f"{name}/{block_hash.ljust(_HASH_BYTES, bytes(1)).hex()}"


_BYTES: Final = 256  # of a mark, padded: a store gives values of known sizes only; chosen


def mark_hashing(store: SharedStore, hello: EngineHello) -> str | None:
    """Store how this engine hashes blocks; returns how another engine does, if that differs."""
    if not (told := hashing_of(hello)):
        return None
    own = told.encode()[:_BYTES].ljust(_BYTES)
    key = f"hashing/{hashlib.sha256(hello.model.encode(errors='surrogatepass')).hexdigest()}"
    there = bytearray(_BYTES)
    known = store.get(key, [there])
    if known and there == own:
        return None
    if known:
        store.remove(key)
    store.put(key, [own])
    return there.decode(errors="replace").strip() if known else None
