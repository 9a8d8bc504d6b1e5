"""CURVE keys: which engines and sidecars may connect beyond loopback
(https://rfc.zeromq.org/spec/25).

A sidecar's folder has its own pair (``sidecar.key_secret``) and, in ``engines/``, the public key of
each engine that may connect. An engine's folder has its own pair (``engine.key_secret``) and the
sidecar's public key (``sidecar.key``). The files are certificates as ZeroMQ's own tools write them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import ConfigError

KEYS_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR_KEYS"
"""Environment variable that names an engine's key folder."""

PublicOf = Callable[[bytes], bytes]
"""Derives the public key from a secret one, as ``zmq.curve_public`` does; passed in so that this
module does not need ZeroMQ."""

_KEY: Final = r'-key\s*=\s*"([0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40})"'  # Z85, 32 bytes
_PUBLIC_KEY: Final = re.compile("public" + _KEY)
_SECRET_KEY: Final = re.compile("secret" + _KEY)
_MOST_BYTES: Final = 4096  # largest file; one that ZeroMQ writes has about 400
ALLOWED: Final = "engines"
SIDECAR, ENGINE = "sidecar", "engine"
PUBLIC, SECRET = ".key", ".key_secret"
SIDECAR_REMEDY: Final = "make it with `kvgraph keys sidecar DIR`"
_ENGINE_REMEDY: Final = "make it with `kvgraph keys engine SIDECARS_DIR NAME DIR`"


class EngineKeys(NamedTuple):
    """An engine's key pair and its sidecar's public key; Z85, 40 characters each."""

    public: bytes
    secret: bytes
    sidecar: bytes

    def present(self, socket: Any) -> None:
        """Make an unconnected ``socket`` authenticate as this engine, to that sidecar only."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.sidecar


class SidecarKeys:
    """A sidecar's key pair and the folder of the engines that may connect."""

    def __init__(self, public: bytes, secret: bytes, engines: Path) -> None:
        self.engines = engines
        self._public, self._secret = public, secret
        self._read: dict[str, tuple[tuple[int, ...], bytes | None]] = {}  # as they were

    def guard(self, socket: Any) -> None:
        """Configure an unbound ``socket`` to authenticate as this sidecar."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret

    def allowed(self) -> frozenset[bytes]:
        """Return the keys of the engines that may connect now; files without one are skipped."""
        try:
            with os.scandir(self.engines) as entries:
                seen = {
                    each.path: self._cached_key(each)
                    for each in entries
                    if each.name.endswith(PUBLIC)
                }
        except OSError:
            return frozenset()
        self._read = seen
        return frozenset(key for _, key in seen.values() if key is not None)

    def _cached_key(self, entry: os.DirEntry[str]) -> tuple[tuple[int, ...], bytes | None]:
        """A file's version and key; it is read again only if it has changed."""
        try:
            found = entry.stat()
            is_so = found.st_mtime_ns, found.st_size, found.st_ino
            known = self._read.get(entry.path)
            return known if known and known[0] == is_so else (is_so, public_key(Path(entry.path)))
        except (OSError, ConfigError):
            return (), None


def load_engine_keys(folder: Path, public_of: PublicOf) -> EngineKeys:
    """Load an engine's keys from ``folder``; raises ConfigError."""
    with explained(folder):
        public, secret = _pair(folder, ENGINE, _ENGINE_REMEDY, public_of)
        sidecar = public_key(existing(folder / f"{SIDECAR}{PUBLIC}", _ENGINE_REMEDY))
    return EngineKeys(public, secret, sidecar)


def load_sidecar_keys(folder: Path, public_of: PublicOf) -> SidecarKeys:
    """Load a sidecar's keys from ``folder``; raises ConfigError."""
    with explained(folder):
        public, secret = _pair(folder, SIDECAR, SIDECAR_REMEDY, public_of)
        engines = folder / ALLOWED
        if stat.S_IMODE(engines.stat().st_mode) & 0o022:
            raise ConfigError(f"{str(engines)!r} is for others to write to: chmod 700")
    return SidecarKeys(public, secret, engines)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ``ConfigError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{str(error.filename or folder)!r}: {error.strerror}") from None


def _pair(folder: Path, name: str, remedy: str, public_of: PublicOf) -> tuple[bytes, bytes]:
    path = existing(folder / f"{name}{SECRET}", remedy)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{str(path)!r} is for others to read: chmod 600, or make new keys")
    text = _content(path)
    public, secret = _found(_PUBLIC_KEY, text, path), _found(_SECRET_KEY, text, path)
    if public_of(secret) != public:
        raise ConfigError(f"{str(path)!r}: its two keys are no pair")
    return public, secret


def public_key(path: Path) -> bytes:
    return _found(_PUBLIC_KEY, _content(path), path)


def _found(key: re.Pattern[str], text: str, path: Path) -> bytes:
    if (match := key.search(text)) is None:
        raise ConfigError(f"{str(path)!r} holds no key")
    return match[1].encode()


def existing(path: Path, remedy: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is missing: {remedy}")
    return path


def _content(path: Path) -> str:
    """Read a regular file, up to the size of a key file; a FIFO does not block."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        return file.read(_MOST_BYTES).decode("ascii", "replace") if is_file else ""
