"""Checks endpoints' form and that they are local, finds sidecars, wakes poll loops."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import Annotated, BinaryIO, Final
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError, InUseError
from .frames import BAD_PAYLOAD

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_IPC_PATH: Final = 107  # bytes of sun_path, less its NUL
ENDPOINT_FORMS: Final = "ipc:///path/to/socket or tcp://127.0.0.1:PORT"


def is_loopback(host: str) -> bool:
    """Return whether ``host`` can only be reached from this machine."""
    return host in LOOPBACK_HOSTS or (host.startswith("127.") and host.replace(".", "").isdigit())


def is_ipv6(endpoint: str) -> bool:
    """Return whether the host is an IPv6 address, for which ZeroMQ needs a socket option."""
    return "[" in endpoint and not endpoint.startswith("ipc://")


def check_endpoint(endpoint: str, *, any_host: bool = False, connects: bool = False) -> str:
    """Return ``endpoint`` if well formed, and local unless ``any_host``; raises ValueError."""
    if endpoint.startswith("ipc://"):
        return _check_ipc(endpoint)
    host, port = _tcp_parts(endpoint)
    if not any_host and not is_loopback(host):
        raise ValueError(
            "goes beyond loopback, which needs CURVE keys on both ends (`kvgraph keys`); "
            f"without them, allowed: {ENDPOINT_FORMS}"
        )
    if connects and port == 0:
        raise ValueError(f"needs a port to connect to; allowed: {ENDPOINT_FORMS}")
    return endpoint


def _check_ipc(endpoint: str) -> str:
    path = endpoint.removeprefix("ipc://")
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"needs an absolute path; allowed: {ENDPOINT_FORMS}")
    if not _is_utf8(path):
        raise ValueError("path is not UTF-8, and ZeroMQ takes no other")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(f"path is longer than {MAX_IPC_PATH} bytes, the system's limit")
    return endpoint


def _is_utf8(path: str) -> bool:
    return path.encode("utf-8", "replace") == os.fsencode(path)


def _tcp_parts(endpoint: str) -> tuple[str, int]:
    if not endpoint.startswith("tcp://"):
        raise ValueError(f"is not an endpoint; allowed: {ENDPOINT_FORMS}")
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    beside = None if host is None else parts.path or parts.query or parts.fragment or parts.username
    if host is None or port is None or beside:
        raise ValueError(f"is not host and port; allowed: {ENDPOINT_FORMS}")
    return host, port


_MOST_BYTES: Final = 1 << 16  # largest such file; chosen


def runtime_dir() -> Path:
    """Return this user's directory for sockets and notes, 0700, created. Raises ConfigError."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base) / f"kvgraph-{os.getuid()}"
    if not _is_utf8(base):
        raise ConfigError(f"runtime directory {str(path)!r} is not UTF-8; set XDG_RUNTIME_DIR")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise InUseError(f"runtime directory {str(path)!r}: {error.strerror}") from None
    # In a shared temporary directory somebody else may have made it first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InUseError(
            f"runtime directory {str(path)!r} must be a directory of this user with mode 0700; "
            "remove it, or set XDG_RUNTIME_DIR"
        )
    return path


class RunningSidecar(msgspec.Struct, frozen=True):
    """What a running sidecar tells other processes of its user, in a file."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    endpoint: str
    http: str
    token: str = ""  # grants access to its TCP endpoint and to sessions and blocks over HTTP


class Note:
    """A running sidecar's file, locked while the sidecar runs. The lock also works between
    containers that share the directory, where process numbers mean nothing.
    """

    def __init__(self, sidecar: RunningSidecar) -> None:
        """Raises ConfigError or OSError."""
        number, fresh = tempfile.mkstemp(".tmp", f"{sidecar.pid}-", runtime_dir())
        self.lock, self.path = os.fdopen(number, "wb"), Path(fresh)
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            self.lock.write(msgspec.json.encode(sidecar))
            self.lock.flush()
            self.path = self.path.rename(self.path.with_suffix(".json"))
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.lock.close()


def running_sidecars() -> list[RunningSidecar]:
    """Return this user's running sidecars; removes the files of those that were killed."""
    found = []
    for path in sorted(runtime_dir().glob("*.json")):
        try:
            # A pipe must not block.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                content = file.read(_MOST_BYTES) if regular else b""
                sidecar = msgspec.json.decode(content, type=RunningSidecar)
                if _is_locked(file):
                    found.append(sidecar)
                else:
                    path.unlink(missing_ok=True)
        except (OSError, *BAD_PAYLOAD):
            continue
    return found


def _is_locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def token_of(address: str) -> str:
    """Return the token of this user's sidecar at an endpoint or URL; empty if unknown."""
    try:
        known = running_sidecars()
    except (ConfigError, OSError):
        return ""
    return next((each.token for each in known if address in (each.endpoint, each.http)), "")


def is_alive(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # larger than any id
        return False
    except PermissionError:
        return True
    return True


class Wake:
    """Wakes a loop that sleeps in poll, from another thread or a signal handler. ``fd`` is readable
    while a wake-up is pending.
    """

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)

    def set(self) -> None:
        """Wake the loop; several calls before it runs count as one."""
        with contextlib.suppress(OSError):  # full: it is due anyway; closed: nobody sleeps
            os.write(self._writer, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 512)  # more is left for the next turn: larger room costs page faults

    def close(self) -> None:
        """Close the descriptors; a later ``set`` does nothing, even if their numbers are reused."""
        reader, writer, self.fd, self._writer = self.fd, self._writer, -1, -1
        os.close(reader)
        os.close(writer)
