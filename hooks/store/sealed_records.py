"""``SealedRecords``: a worker's records in a shared store, each sealed with its block's name."""

from __future__ import annotations

import logging
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ..once import Once
from .shared_store import SharedStore
from .store_breaker import StoreBreaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer, WriteableBuffer

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
    """Records of one size in a store that is not trusted to give back what it was given.

    A seal before each record holds the key and a checksum of both. It guards against damage and
    mistakes, not against who can write to the store and means harm. Any thread may call this.

    Args:
        store: Where the bytes are kept.
        name: Of all that the bytes depend on but the block; part of every key.
        clock: Monotonic seconds.

    Attributes:
        breaker: Refuses while the store cannot be read. Writing has its own: a full store can be
            read.
        damaged: Records whose bytes did not match their seal.
        spared: Records that were there already and were not sent again.
    """

    def __init__(
        self, store: SharedStore, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breaker, self._writing = StoreBreaker(clock), StoreBreaker(clock)
        self.damaged = self.spared = 0
        self._store, self._name, self._clock = store, name, clock
        self._seed = zlib.crc32(name.encode())
        self._disowned = False
        self._once = Once(logger)

    def write(self, key: bytes, record: ReadableBuffer) -> bool:
        """Keep a copy of ``record`` unless there is one; False if the store does not take it."""
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
        """Fill ``into``; False, and ``into`` is undefined, if there is no such record whole."""
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
        """Forget a record, for every engine."""
        if self._writing.allows():
            with self._watched(self._writing):
                self._store.remove(store_key(self._name, key))

    def disown(self) -> None:
        """Neither read nor write any more: this engine's weights may not be what the name says."""
        self._disowned = True

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def _seal(self, key: bytes, record: ReadableBuffer) -> bytes:
        size = memoryview(record).nbytes
        checksum = zlib.crc32(record, zlib.crc32(key, self._seed))
        return _SEAL.pack(_MAGIC, key, size, checksum)

    @contextmanager
    def _watched(self, breaker: StoreBreaker) -> Iterator[None]:
        """Tell a breaker what became of the calls inside; what they raise ends here."""
        began = self._clock()
        try:
            yield
        except OSError as error:
            breaker.failed()
            self._once.warn("failed", _FAILED, error.strerror or str(error) or type(error).__name__)
        else:
            breaker.succeeded(self._clock() - began)


def store_key(name: str, block_hash: bytes) -> str:
    """Under which key the worker that calls its records by ``name`` keeps a block's."""
    return f"{name}/{block_hash.ljust(_HASH_BYTES, bytes(1)).hex()}"
