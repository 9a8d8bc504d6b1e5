"""``MooncakeStore``: the memory of many machines as one shared store, by Mooncake's store."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ...kernels.errors import StorageError
from .store_settings import MOONCAKE

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_BUFFER_BYTES: Final = 128 << 20  # through which this client's values pass; chosen
_CONNECT_S: Final = 2.0  # to the master, at the engine's start; chosen
_HANDSHAKE: Final = "P2PHANDSHAKE"  # clients find each other by the master alone
_INSTALL: Final = (
    "pip install 'kvgraph[mooncake]', and Debian's libibverbs1 (no RDMA hardware is needed)"
)


class MooncakeStore:
    """A client of a Mooncake master, over TCP.

    A value is in the memory of one client, and gone with it: for some ten seconds after it was
    killed, its values are said to be there and are not given. While the master is dead, every call
    blocks for some four seconds. The client listens on all interfaces, without a password.

    Args:
        place: ``mooncake://HOST:PORT``, the master.
        adds: Bytes of this process's memory for values.

    Raises:
        StorageError: Mooncake is not installed, or there is no such master.
    """

    def __init__(self, place: str, adds: int) -> None:
        host, _, port = place.removeprefix(MOONCAKE).rpartition(":")
        if not host or not port.isdecimal():
            raise StorageError(f"shared store {place}: allowed: {MOONCAKE}HOST:PORT")
        self._client = _new_client(place)
        try:
            own = _own_address(host, int(port))
        except OSError as error:
            raise StorageError(f"shared store {place}: {error.strerror or error}") from error
        master = f"{host}:{port}"
        code = self._client.setup(own, _HANDSHAKE, adds, _BUFFER_BYTES, "tcp", "", master)
        if code:
            raise StorageError(f"shared store {place}: no master takes us (code {code})")

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """See ``SharedStore``."""
        there: list[int] = self._client.batch_is_exist(list(keys))
        if any(code < 0 for code in there):
            raise OSError("the master does not answer")
        return [bool(code) for code in there]

    def get(self, key: str, parts: Sequence[WriteableBuffer]) -> bool:
        """See ``SharedStore``."""
        value = self._client.get_buffer(key)
        views = [memoryview(part).cast("B") for part in parts]
        if value is None or value.size() != sum(len(view) for view in views):
            return False
        source, at = memoryview(value).cast("B"), 0
        for view in views:
            view[:] = source[at : at + len(view)]
            at += len(view)
        return True

    def put(self, key: str, parts: Sequence[ReadableBuffer]) -> None:
        """See ``SharedStore``; a value that is there stays as it is."""
        if code := self._client.put_parts(key, *parts):
            raise OSError(f"the store did not take a value (code {code})")

    def remove(self, key: str) -> None:
        """See ``SharedStore``; one that was read within ten seconds stays, by its lease."""
        self._client.remove(key)

    def close(self) -> None:
        """See ``SharedStore``; values in this process's memory go."""
        self._client.close()


def _new_client(place: str) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StorageError(f"shared store {place}: {error}: {_INSTALL}") from error
    return MooncakeDistributedStore()


def _own_address(host: str, port: int) -> str:
    """By which address of this machine the master is reached; where nobody answers, Mooncake
    itself would try for ever."""
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        return str(connection.getsockname()[0])
