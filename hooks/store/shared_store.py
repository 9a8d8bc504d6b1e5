"""``SharedStore``: what every store must do, and how one is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .store_settings import StoreSettings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class SharedStore(Protocol):
    """Bytes by key, kept outside of this process; any thread may call it, and any call may hang.

    Nobody promises that what was put is still there, nor that it is what was put.
    """

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Which of ``keys`` are there.

        Raises:
            OSError: The store does not work.
        """

    def get(self, key: str, parts: Sequence[WriteableBuffer]) -> bool:
        """Fill ``parts``, one behind the other; False if there is no such value of that size.

        Raises:
            OSError: The store does not work.
        """

    def put(self, key: str, parts: Sequence[ReadableBuffer]) -> None:
        """Keep ``parts`` as one value; one that is there already may stay as it is.

        Raises:
            OSError: The store does not work, or is full.
        """

    def remove(self, key: str) -> None:
        """Forget a value, if the store does so now.

        Raises:
            OSError: The store does not work.
        """

    def close(self) -> None:
        """Let go of it; what was put stays."""


def open_store(settings: StoreSettings, adds: bool = True) -> SharedStore:
    """Open the store that ``settings`` name.

    Args:
        adds: Whether this client adds room to the store, where clients do so.

    Raises:
        StorageError: It cannot be used; the message says why.
    """
    if settings.is_mooncake:
        from .mooncake_store import MooncakeStore  # asked for, or never imported

        return MooncakeStore(settings.place, settings.capacity_bytes if adds else 0)
    from .directory_store import DirectoryStore

    return DirectoryStore(settings.place, settings.capacity_bytes)
