"""Files of traces, plain or gzipped: their lines, in bounded memory, and new ones."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Final, TextIO, cast

from ..errors import TraceError

MAX_LINE: Final = 8 << 20  # bytes: a prompt of a million blocks still fits; chosen
_GZIP_MAGIC: Final = b"\x1f\x8b"
_MARK: Final = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which spreadsheets write


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line number, line)``, numbered from 1, blank lines left out.

    Gzip is recognised by its content; a byte order mark is left out. At most ``MAX_LINE`` bytes are
    held at once.

    Raises:
        TraceError: The file cannot be read, its gzip is damaged, or a line has no end.
    """
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE} bytes")
                line = line.removeprefix(_MARK) if number == 1 else line
                if line and not line.isspace():
                    yield number, line
    except EOFError:
        raise TraceError(f"{path}:{number + 1}: the gzip file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}:{number + 1}: the gzip file is damaged ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_whole(path: Path, limit: int) -> bytes:
    """All of a file, gzipped or not, without a byte order mark; ``limit`` bytes of it at most are
    held.

    Raises:
        TraceError: The file cannot be read, its gzip is damaged, or it is longer.
    """
    try:
        with _open(path) as file:
            data = file.read(limit + 1)
    except EOFError:
        raise TraceError(f"{path}: the gzip file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the gzip file is damaged ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > limit:
        raise TraceError(f"{path}: longer than {limit} bytes")
    return data.removeprefix(_MARK)


def new_file(path: Path) -> TextIO:
    """Open a file for writing text, gzipped if it ends in ``.gz``; it must not exist.

    Raises:
        TraceError: The file exists or cannot be written.
    """
    try:
        return cast(TextIO, gzip.open(path, "xt") if path.suffix == ".gz" else path.open("x"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from None


def _open(path: Path) -> BufferedIOBase:
    with path.open("rb") as file:
        zipped = file.read(2) == _GZIP_MAGIC
    return gzip.open(path, "rb") if zipped else path.open("rb")
