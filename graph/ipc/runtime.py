"""The notes that running sidecars leave, so that other processes of this user find them."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from ..errors import ConfigError
from ..messages.refusals import BAD_PAYLOAD

_MOST_BYTES: Final = 1 << 16  # of a note; chosen


def runtime_dir() -> Path:
    """This user's private directory for sockets and notes, created when missing (0700).

    Raises:
        ConfigError: It cannot be made, or it is not ours alone.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base) / f"kvgraph-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"runtime directory {str(path)!r}: {error.strerror}") from None
    # In a shared temporary directory somebody else may have made it first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"runtime directory {str(path)!r} must be a directory of this user with mode 0700; "
            "remove it, or set XDG_RUNTIME_DIR"
        )
    return path


class RunningSidecar(msgspec.Struct, frozen=True):
    """What a sidecar's note says to its own user.

    Attributes:
        token: Opens its tcp endpoint, and its HTTP answers about sessions and blocks.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    endpoint: str
    http: str
    token: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeNote:
    """The file ``<pid>.json`` of one running sidecar."""

    path: Path

    @classmethod
    def write(cls, sidecar: RunningSidecar) -> RuntimeNote:
        """Leave a note of ``sidecar``; raises ConfigError or OSError when that cannot be."""
        path = runtime_dir() / f"{sidecar.pid}.json"
        fresh = path.with_suffix(".tmp")
        fresh.unlink(missing_ok=True)
        with open(fresh, "xb", opener=_private) as file:
            file.write(msgspec.json.encode(sidecar))
        fresh.replace(path)
        return cls(path)

    def remove(self) -> None:
        """Remove the note."""
        self.path.unlink(missing_ok=True)


def running_sidecars() -> list[RunningSidecar]:
    """Every sidecar of this user whose process is alive; notes of dead ones are removed."""
    found = []
    for path in sorted(runtime_dir().glob("*.json")):
        try:
            sidecar = msgspec.json.decode(_content(path), type=RunningSidecar)
        except (OSError, *BAD_PAYLOAD):
            continue
        if is_alive(sidecar.pid):
            found.append(sidecar)
        else:
            path.unlink(missing_ok=True)
    return found


def token_of(address: str) -> str:
    """The token of this user's sidecar whose endpoint or URL is ``address``; empty without one."""
    try:
        known = running_sidecars()
    except (ConfigError, OSError):
        return ""
    return next((each.token for each in known if address in (each.endpoint, each.http)), "")


def _content(path: Path) -> bytes:
    """What a regular file says, as far as it can be a note; nobody is waited for."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        return file.read(_MOST_BYTES) if stat.S_ISREG(os.fstat(number).st_mode) else b""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_alive(pid: int) -> bool:
    """Whether a process of this id exists."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # larger than any id
        return False
    except PermissionError:
        return True
    return True
