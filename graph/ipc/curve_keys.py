"""CURVE keys: who may speak with whom beyond loopback (https://rfc.zeromq.org/spec/25).

A sidecar's folder has its own pair (``sidecar.key_secret``) and, in ``engines/``, the public key of
each engine that may connect. An engine's folder has its own pair (``engine.key_secret``) and the
sidecar's public key (``sidecar.key``). The files are ZeroMQ's own certificates.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path
from typing import Final, NamedTuple

import zmq
import zmq.auth

from ..errors import ConfigError

KEYS_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR_KEYS"
"""Names an engine's folder."""

_NAME: Final = re.compile(r"[\w.-]{1,64}")
_ALLOWED: Final = "engines"
_SIDECAR, _ENGINE = "sidecar", "engine"
_PUBLIC, _SECRET = ".key", ".key_secret"


class EngineKeys(NamedTuple):
    """An engine's pair, and the key by which it knows the sidecar: Z85, 40 characters each."""

    public: bytes
    secret: bytes
    sidecar: bytes

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket``, before it connects, speak as this engine, and to that sidecar only."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.sidecar


class SidecarKeys(NamedTuple):
    """A sidecar's pair, and where the keys of the engines lie that may connect."""

    public: bytes
    secret: bytes
    engines: Path

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket``, not bound yet, speak as this sidecar."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def allowed(self) -> frozenset[bytes]:
        """The public keys of the engines that may connect by now; a file that is none is left
        out."""
        found = set()
        for path in self.engines.glob(f"*{_PUBLIC}"):
            try:
                found.add(zmq.auth.load_certificate(path)[0])
            except (OSError, ValueError):
                continue
        return frozenset(found)


def new_sidecar_keys(folder: Path) -> Path:
    """Make a sidecar's folder; returns the file of its public key.

    Raises:
        ConfigError: It has keys already, or cannot be written.
    """
    made = _create(folder, _SIDECAR)
    (folder / _ALLOWED).mkdir(exist_ok=True)
    return made


def new_engine_keys(sidecar: Path, name: str, folder: Path) -> Path:
    """Make an engine's folder, and allow it at the sidecar; returns what allows it there.

    Args:
        sidecar: The sidecar's folder.
        name: Of the engine, there.

    Raises:
        ConfigError: The name is none, or taken; or a folder is not as it should be.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"engine {name!r}: allowed: 1 to 64 letters, digits, '.', '_' and '-'")
    allowed = sidecar / _ALLOWED / f"{name}{_PUBLIC}"
    if allowed.exists():
        raise ConfigError(f"an engine called {name!r} is allowed already: {str(allowed)!r}")
    own = _existing(sidecar / f"{_SIDECAR}{_PUBLIC}", "make it with `kvgraph keys sidecar DIR`")
    made = _create(folder, _ENGINE)
    try:
        shutil.copyfile(own, folder / own.name)
        allowed.parent.mkdir(exist_ok=True)
        shutil.copyfile(made, allowed)
    except OSError as error:
        raise ConfigError(f"{error.filename!r}: {error.strerror}") from None
    return allowed


def load_engine_keys(folder: Path) -> EngineKeys:
    """An engine's keys.

    Raises:
        ConfigError: They are not there, no keys, or for others to read.
    """
    remedy = "make them with `kvgraph keys engine SIDECARS_DIR NAME DIR`"
    public, secret = _pair(folder, _ENGINE, remedy)
    sidecar, _ = _read(_existing(folder / f"{_SIDECAR}{_PUBLIC}", remedy))
    return EngineKeys(public, secret, sidecar)


def load_sidecar_keys(folder: Path) -> SidecarKeys:
    """A sidecar's keys.

    Raises:
        ConfigError: They are not there, no keys, or for others to read.
    """
    public, secret = _pair(folder, _SIDECAR, "make them with `kvgraph keys sidecar DIR`")
    return SidecarKeys(public, secret, folder / _ALLOWED)


def _create(folder: Path, name: str) -> Path:
    """A new pair; returns the file of its public key."""
    if (path := folder / f"{name}{_SECRET}").exists():
        raise ConfigError(f"{str(path)!r} exists: remove it if nobody uses it any more")
    umask = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        public, _ = zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r}: {error.strerror}") from None
    finally:
        os.umask(umask)
    return Path(public)


def _pair(folder: Path, name: str, remedy: str) -> tuple[bytes, bytes]:
    path = _existing(folder / f"{name}{_SECRET}", remedy)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{str(path)!r} is for others to read: chmod 600, or make new keys")
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(f"{str(path)!r} has no secret key")
    return public, secret


def _existing(path: Path, remedy: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is missing: {remedy}")
    return path


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} holds no key: {error}") from None
