"""CURVE keys: who may speak with whom beyond loopback (https://rfc.zeromq.org/spec/25).

A sidecar's folder has its own pair (``sidecar.key_secret``) and, in ``engines/``, the public key of
each engine that may connect. An engine's folder has its own pair (``engine.key_secret``) and the
sidecar's public key (``sidecar.key``). The files are certificates as ZeroMQ's own tools write them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from ..errors import ConfigError

KEYS_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR_KEYS"
"""Names an engine's folder."""

_NAME: Final = re.compile(r"[\w.-]{1,64}")
_KEY: Final = r'-key\s*=\s*"([0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40})"'  # Z85, 32 bytes
_PUBLIC_KEY: Final = re.compile("public" + _KEY)
_SECRET_KEY: Final = re.compile("secret" + _KEY)
_MOST_BYTES: Final = 4096  # of a file; one that ZeroMQ writes has about 400
_ALLOWED: Final = "engines"
_SIDECAR, _ENGINE = "sidecar", "engine"
_PUBLIC, _SECRET = ".key", ".key_secret"
_SIDECAR_REMEDY: Final = "make it with `kvgraph keys sidecar DIR`"
_ENGINE_REMEDY: Final = "make it with `kvgraph keys engine SIDECARS_DIR NAME DIR`"


class EngineKeys(NamedTuple):
    """An engine's pair, and the key by which it knows the sidecar: Z85, 40 characters each."""

    public: bytes
    secret: bytes
    sidecar: bytes

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket``, before it connects, speak as this engine, and to that sidecar only."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.sidecar


class SidecarKeys:
    """A sidecar's pair, and where the keys of the engines lie that may connect.

    Args:
        public, secret: Z85, 40 characters each.
    """

    def __init__(self, public: bytes, secret: bytes, engines: Path) -> None:
        self.engines = engines
        self._public, self._secret = public, secret
        self._read: dict[str, tuple[tuple[int, ...], bytes | None]] = {}  # as they were

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket``, not bound yet, speak as this sidecar."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret

    def allowed(self) -> frozenset[bytes]:
        """The public keys of the engines that may connect by now: none while the folder cannot be
        read. A file that holds no key is left out."""
        try:
            with os.scandir(self.engines) as entries:
                seen = {
                    each.path: self._looked_at(each)
                    for each in entries
                    if each.name.endswith(_PUBLIC)
                }
        except OSError:
            return frozenset()
        self._read = seen
        return frozenset(key for _, key in seen.values() if key is not None)

    def _looked_at(self, entry: os.DirEntry[str]) -> tuple[tuple[int, ...], bytes | None]:
        """A file as it is, and its key; it is read again only if it has changed."""
        try:
            found = entry.stat()
            is_so = found.st_mtime_ns, found.st_size, found.st_ino
            known = self._read.get(entry.path)
            return known if known and known[0] == is_so else (is_so, _public(Path(entry.path)))
        except (OSError, ConfigError):
            return (), None


def new_sidecar_keys(folder: Path) -> None:
    """Make a sidecar's folder.

    Raises:
        ConfigError: It has keys already, or cannot be written.
    """
    with _explained(folder):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        (folder / _ALLOWED).mkdir(0o700, exist_ok=True)
        public, secret = zmq.curve_keypair()
        _write({folder / f"{_SIDECAR}{_SECRET}": _text(public, secret),
                folder / f"{_SIDECAR}{_PUBLIC}": _text(public)})  # fmt: skip


def new_engine_keys(sidecar: Path, name: str, folder: Path) -> Path:
    """Make an engine's folder, and allow it at the sidecar; returns what allows it there.

    Args:
        sidecar: The sidecar's folder.
        name: Of the engine, there.

    Raises:
        ConfigError: The name is none, or taken; or a folder is not as it should be. Nothing is
            left then.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"engine {name!r}: allowed: 1 to 64 letters, digits, '.', '_' and '-'")
    with _explained(folder):
        if folder.resolve().is_relative_to(sidecar.resolve()):
            raise ConfigError(f"{str(folder)!r} is the sidecar's; an engine needs a folder apart")
        own = _public(_existing(sidecar / f"{_SIDECAR}{_PUBLIC}", _SIDECAR_REMEDY))
        allowed = sidecar / _ALLOWED / f"{name}{_PUBLIC}"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        allowed.parent.mkdir(0o700, exist_ok=True)
        public, secret = zmq.curve_keypair()
        _write({folder / f"{_ENGINE}{_SECRET}": _text(public, secret),
                folder / f"{_ENGINE}{_PUBLIC}": _text(public),
                folder / f"{_SIDECAR}{_PUBLIC}": _text(own),
                allowed: _text(public)})  # fmt: skip
    return allowed


def load_engine_keys(folder: Path) -> EngineKeys:
    """An engine's keys.

    Raises:
        ConfigError: They are not there, no pair of keys, or for others to read.
    """
    with _explained(folder):
        public, secret = _pair(folder, _ENGINE, _ENGINE_REMEDY)
        sidecar = _public(_existing(folder / f"{_SIDECAR}{_PUBLIC}", _ENGINE_REMEDY))
    return EngineKeys(public, secret, sidecar)


def load_sidecar_keys(folder: Path) -> SidecarKeys:
    """A sidecar's keys.

    Raises:
        ConfigError: They are not there, no pair of keys, or for others to read; or others may
            write to the folder of those that are allowed.
    """
    with _explained(folder):
        public, secret = _pair(folder, _SIDECAR, _SIDECAR_REMEDY)
        engines = folder / _ALLOWED
        if stat.S_IMODE(engines.stat().st_mode) & 0o022:
            raise ConfigError(f"{str(engines)!r} is for others to write to: chmod 700")
    return SidecarKeys(public, secret, engines)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turns what the system refuses into a message that names the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{str(error.filename or folder)!r}: {error.strerror}") from None


def _pair(folder: Path, name: str, remedy: str) -> tuple[bytes, bytes]:
    path = _existing(folder / f"{name}{_SECRET}", remedy)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{str(path)!r} is for others to read: chmod 600, or make new keys")
    text = _content(path)
    public, secret = _found(_PUBLIC_KEY, text, path), _found(_SECRET_KEY, text, path)
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{str(path)!r}: its two keys are no pair")
    return public, secret


def _public(path: Path) -> bytes:
    return _found(_PUBLIC_KEY, _content(path), path)


def _found(key: re.Pattern[str], text: str, path: Path) -> bytes:
    if (match := key.search(text)) is None:
        raise ConfigError(f"{str(path)!r} holds no key")
    return match[1].encode()


def _existing(path: Path, remedy: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is missing: {remedy}")
    return path


def _content(path: Path) -> str:
    """What a regular file says, as far as it can be a key's; nobody is waited for."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        return file.read(_MOST_BYTES).decode("ascii", "replace") if is_file else ""


def _text(public: bytes, secret: bytes | None = None) -> str:
    """A certificate as ZeroMQ's tools write it."""
    lines = ["#   made by `kvgraph keys`", "metadata", "curve"]
    lines.append(f'    public-key = "{public.decode()}"')
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write(texts: dict[Path, str]) -> None:
    """Write new files for their owner alone, all or none of them."""
    made: list[Path] = []
    try:
        for path, text in texts.items():
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            made.append(path)
            with open(number, "w", encoding="ascii") as file:
                file.write(text)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
