"""The mark that engines leave in a shared store: how they hash blocks."""

from __future__ import annotations

import hashlib
from typing import Final

from ...graph.messages.block_hashing import hashing_of
from ...graph.messages.events import EngineHello
from .shared_store import SharedStore

_BYTES: Final = 256  # of a mark, padded: a store gives values of known sizes only; chosen


def mark_hashing(store: SharedStore, hello: EngineHello) -> str | None:
    """Leave an engine's mark, and read the one that was there.

    Returns:
        The hashing that another engine of this model left, if it differs from this one's; None if
        it is the same, or nobody left any.

    Raises:
        OSError: The store does not work.
    """
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
