"""Reads a person's file as it is, and writes it whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from ...graph.errors import ConfigError


def read_whole(path: Path) -> str:
    """The text of a file, with its line ends as they are; empty where there is no file.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8, as TOML must be: {error}") from None


def replace_whole(path: Path, text: str) -> None:
    """Write a file, or leave it as it is.

    A link stays a link, and what it names is written. Mode, and owner and group where this user
    may give them, stay; nobody else can read the text while it is written.

    Raises:
        ConfigError: It cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        # A name that nobody can have taken before, not even with a link.
        number, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(number, "wb") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                _copy_rights(target, number)
                os.fsync(number)
            os.replace(fresh, target)
        except BaseException:
            os.unlink(fresh)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _copy_rights(target: Path, number: int) -> None:
    """Give an open file the group, owner and mode of one that it will replace."""
    try:
        found = target.stat()
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(found.st_mode) & 0o777
    try:
        os.fchown(number, -1, found.st_gid)
    except PermissionError:
        # Another group than it was meant for may do what everybody may.
        mode = mode & 0o707 | (mode & 0o007) << 3
    with contextlib.suppress(PermissionError):
        os.fchown(number, found.st_uid, -1)
    os.fchmod(number, mode)
