"""Private directories for sockets; removes those whose owners were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ..graph.ipc.addresses import MAX_IPC_PATH

_PREFIX: Final = "kvgraph-"
_KEY: Final = "owner"  # locked while the owner lives; without it a directory is nobody's to judge
_LONGEST_NAME: Final = len("/kvgraph.sock")


class SocketDirectory:
    """A new directory that only this user can enter (0700), short enough for a socket's path.

    A process that is killed leaves its directory behind. The next process removes it if a lock
    shows that its owner is gone, in whatever container of this machine it ran.
    """

    def __init__(self) -> None:
        self.path = _new_directory()
        self._key = _locked(self.path)
        _remove_deserted(self.path.parent)

    def close(self) -> None:
        """Remove it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._key is not None:
            os.close(self._key)
            self._key = None


def _new_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(directory)) + _LONGEST_NAME > MAX_IPC_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    return directory


def _locked(directory: Path) -> int | None:
    """Lock a directory's key before it can be seen; None where there are no locks."""
    unseen = directory / f".{_KEY}"
    key = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(key, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(key)
        unseen.unlink()
        return None
    unseen.rename(directory / _KEY)
    return key


def _remove_deserted(root: Path) -> None:
    for key in root.glob(f"{_PREFIX}*/{_KEY}"):
        with contextlib.suppress(OSError):
            if key.parent.stat().st_uid == os.getuid() and _is_free(key):
                shutil.rmtree(key.parent, ignore_errors=True)


def _is_free(key: Path) -> bool:
    """Whether nobody holds the lock of ``key``."""
    file = os.open(key, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
